// pycomm._native.FrameCall: what an ordinary all_reduce does on either side of a swap of frames.
//
// Over transports that compare nothing themselves the ranks swap frames (pycomm/algorithms/_agreement.py). Python leads
// such a call; what would take it longer than MPI takes for the swap is here: to read the tensor, to write the frame and
// the board, to compare all ranks' frames, and to reduce what lies in them. Used by one thread at a time.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../kernels/reduce.h"
#include "../shm/board.h"
#include "gil.h"
#include "plain_tensor.h"

namespace py = pybind11;

namespace pycomm {
namespace {

constexpr std::size_t kPayloadAt = 64;       // FRAME_HEADER_BYTES of pycomm/transport/base.py
constexpr std::size_t kComparedBytes = 32;

struct Header {  // _HEADER of pycomm/algorithms/_agreement.py
  std::uint8_t verb, op, dtype, unused;
  std::int32_t root;
  std::int64_t numel;
  char algorithm[16];
  double factor;
};
static_assert(offsetof(Header, factor) == kComparedBytes && sizeof(Header) == 40);

// By which way a call goes: its name as the ranks compare it, its number on the board, and whether the frame carries all.
struct Way {
  char name[16] = {};
  std::uint8_t number = 0;
};

class FrameCall {
 public:
  FrameCall(const py::object& tensor, const py::object& parameter, std::uintptr_t frame, int verb) : tensors_(tensor, parameter), frame_(pointer(frame)) {
    header_.verb = static_cast<std::uint8_t>(verb);
    header_.factor = 1.0;
  }

  bool can_read() const { return tensors_.can_read(); }

  // What calls are called that frames carry whole (`framed`), and the others; `log`, if any, knows them by numbers.
  void name(const std::string& framed, const std::string& other) {
    framed.copy(framed_.name, sizeof framed_.name);
    other.copy(other_.name, sizeof other_.name);
  }
  void record_on(std::shared_ptr<shm::Log> log, int framed, int other) {
    log_ = std::move(log);
    framed_.number = static_cast<std::uint8_t>(framed);
    other_.number = static_cast<std::uint8_t>(other);
  }

  // The bytes of the user's tensor; 0, and nothing has happened, if the short cut cannot take these arguments.
  std::size_t read(py::handle tensor, py::handle op) {
    ReduceOp parsed;
    if (!tensors_.read(tensor.ptr(), flat_) || !read_op(op.ptr(), flat_.dtype, parsed)) return 0;
    header_.op = static_cast<std::uint8_t>(parsed);
    header_.dtype = static_cast<std::uint8_t>(flat_.dtype);
    header_.numel = static_cast<std::int64_t>(flat_.numel);
    return flat_.bytes();
  }

  // The call begins, as the group's number `seq`: writes the board and the frame, and returns how much of that counts.
  std::size_t begin(bool is_framed, std::uint64_t seq) {
    const Way& way = is_framed ? framed_ : other_;
    const std::size_t bytes = flat_.bytes();
    if (log_) {
      const std::uint8_t flags = is_framed ? shm::kIsPlan : 0;
      log_->begin({header_.verb, header_.op, header_.dtype, flags, way.number, 0, flat_.numel, bytes}, seq, log_->ticks());
    }
    std::memcpy(header_.algorithm, way.name, sizeof way.name);
    std::memcpy(frame_, &header_, sizeof header_);
    if (!is_framed) return kPayloadAt;
    std::memcpy(frame_ + kPayloadAt, flat_.data, bytes);
    return kPayloadAt + bytes;
  }

  // Where all ranks' frames lie, in rank order, once they have been swapped.
  void look_at(const std::vector<std::uintptr_t>& frames) {
    headers_.clear();
    payloads_.clear();
    for (const std::uintptr_t frame : frames) {
      headers_.push_back(pointer(frame));
      payloads_.push_back(pointer(frame) + kPayloadAt);
    }
  }

  bool agrees() const {
    for (const unsigned char* header : headers_)
      if (std::memcmp(header, &header_, kComparedBytes) != 0) return false;
    return true;
  }

  // Combines the payloads, in rank order, into the user's tensor.
  void reduce() const {
    std::optional<WithoutGil> released;
    if (flat_.bytes() >= kUnlockedBytes) released.emplace();
    pycomm::reduce(flat_.data, payloads_.data(), static_cast<int>(payloads_.size()), flat_.numel, flat_.dtype, static_cast<ReduceOp>(header_.op), nullptr,
                   false);
  }

  void end(bool has_failed) {
    if (!log_) return;
    if (has_failed) log_->fail();
    log_->end();
  }

 private:
  static unsigned char* pointer(std::uintptr_t address) { return reinterpret_cast<unsigned char*>(address); }

  PlainTensors tensors_;
  unsigned char* frame_;
  std::shared_ptr<shm::Log> log_;
  Way framed_, other_;
  Flat flat_{};
  Header header_{};
  std::vector<const unsigned char*> headers_;
  std::vector<const void*> payloads_;
};

}  // namespace

void bind_frames(py::module_& m);  // module.cpp

void bind_frames(py::module_& m) {
  py::class_<FrameCall>(m, "FrameCall", "What an ordinary all_reduce does on either side of a swap of frames.")
      .def(py::init<const py::object&, const py::object&, std::uintptr_t, int>(), py::arg("tensor"), py::arg("parameter"), py::arg("frame"), py::arg("verb"))
      .def_property_readonly("can_read", &FrameCall::can_read)
      .def("name", &FrameCall::name, py::arg("framed"), py::arg("other"))
      .def("record_on", &FrameCall::record_on, py::arg("log"), py::arg("framed"), py::arg("other"))
      .def("read", &FrameCall::read)
      .def("begin", &FrameCall::begin)
      .def("look_at", &FrameCall::look_at, py::arg("frames"))
      .def("agrees", &FrameCall::agrees)
      .def("reduce", &FrameCall::reduce)
      .def("end", &FrameCall::end);
}

}  // namespace pycomm
