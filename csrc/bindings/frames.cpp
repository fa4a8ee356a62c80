// pycomm._native.FrameCall: what an ordinary collective does on either side of a swap of frames.
//
// Over transports that compare nothing themselves the ranks swap frames (pycomm/algorithms/_agreement.py). Python leads
// such a call; what would take it longer than MPI takes for the swap is here: to read the tensors, to write the frame and
// the board, to compare all ranks' frames, and to make the result of what lies in them. Used by one thread at a time.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../kernels/reduce.h"
#include "../shm/board.h"
#include "../shm/group.h"
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
  FrameCall(const py::object& tensor, const py::object& parameter, std::uintptr_t frame, int rank, int ranks)
      : tensors_(tensor, parameter), frame_(pointer(frame)), rank_(rank), ranks_(ranks) {}

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

  // The call of a verb (as csrc/shm/group.h numbers them) with the user's own arguments: returns how many bytes a frame has to have
  // room for, on every rank the same; -1, and nothing has happened, if the short cut cannot take them.
  std::int64_t read(int verb, const py::args& args) {
    header_ = {};
    header_.verb = static_cast<std::uint8_t>(verb);
    header_.factor = 1.0;
    input_ = output_ = {};
    verb_ = static_cast<Verb>(verb);
    if (!read_arguments(args)) return -1;
    const Flat& part = output_.bytes() < input_.bytes() ? output_ : input_;
    header_.dtype = static_cast<std::uint8_t>(part.dtype);
    header_.numel = static_cast<std::int64_t>(part.numel);
    return static_cast<std::int64_t>(input_.bytes());
  }

  // The call begins, as the group's number `seq`: writes the board and the frame, and returns how much of that counts.
  std::size_t begin(bool is_framed, std::uint64_t seq) {
    const Way& way = is_framed ? framed_ : other_;
    if (log_) {
      const std::uint8_t flags = is_framed ? shm::kIsPlan : 0;
      const auto numel = static_cast<std::uint64_t>(header_.numel);
      const std::size_t bytes = std::max(input_.bytes(), output_.bytes());
      log_->begin({header_.verb, header_.op, header_.dtype, flags, way.number, header_.root, numel, bytes}, seq, log_->ticks());
    }
    std::memcpy(header_.algorithm, way.name, sizeof way.name);
    std::memcpy(frame_, &header_, sizeof header_);
    const bool is_silent = !is_framed || (verb_ == Verb::kBroadcast && header_.root != rank_);
    const std::size_t sent = is_silent ? 0 : input_.bytes();
    if (sent > 0) std::memcpy(frame_ + kPayloadAt, input_.data, sent);
    return kPayloadAt + sent;
  }

  // Where all ranks' frames lie, in rank order, once they have been swapped.
  void look_at(const std::vector<std::uintptr_t>& frames) {
    headers_.clear();
    for (const std::uintptr_t frame : frames) headers_.push_back(pointer(frame));
    payloads_.resize(frames.size());
  }

  bool agrees() const {
    for (const unsigned char* header : headers_)
      if (std::memcmp(header, &header_, kComparedBytes) != 0) return false;
    return true;
  }

  // Makes the result of all ranks' payloads, in rank order, in the user's tensor.
  void finish() {
    switch (verb_) {
      case Verb::kReduce:
        if (header_.root != rank_) return;
        [[fallthrough]];
      case Verb::kAllReduce: return reduce(0);
      case Verb::kReduceScatter: return reduce(static_cast<std::size_t>(rank_) * output_.bytes());
      case Verb::kBroadcast:
        if (header_.root != rank_) std::memcpy(output_.data, payload(static_cast<std::size_t>(header_.root)), output_.bytes());
        return;
      case Verb::kAllGather:
        for (std::size_t r = 0; r < headers_.size(); ++r) std::memcpy(static_cast<unsigned char*>(output_.data) + r * input_.bytes(), payload(r), input_.bytes());
        return;
      default: return;  // a barrier
    }
  }

  void end(bool has_failed) {
    if (!log_) return;
    if (has_failed) log_->fail();
    log_->end();
  }

 private:
  using Verb = shm::Verb;

  static unsigned char* pointer(std::uintptr_t address) { return reinterpret_cast<unsigned char*>(address); }
  const unsigned char* payload(std::size_t rank) const { return headers_[rank] + kPayloadAt; }

  bool read_arguments(const py::args& args) {
    const std::size_t count = args.size();
    const auto arg = [&](std::size_t i) { return PyTuple_GET_ITEM(args.ptr(), static_cast<Py_ssize_t>(i)); };
    const auto in_place = [&] { return tensors_.read(arg(0), input_) && (output_ = input_, true); };
    const auto op_at = [&](std::size_t i) {
      ReduceOp op;
      if (count > i + 1 || !read_op(count > i ? arg(i) : nullptr, input_.dtype, op)) return false;
      header_.op = static_cast<std::uint8_t>(op);
      return true;
    };
    switch (verb_) {
      case Verb::kBarrier: return count == 0;
      case Verb::kAllReduce: return count >= 1 && in_place() && op_at(1);
      case Verb::kReduce: return count >= 2 && in_place() && read_rank(arg(1), ranks_, header_.root) && op_at(2);
      case Verb::kBroadcast: return count == 2 && in_place() && read_rank(arg(1), ranks_, header_.root);
      case Verb::kAllGather: return count == 2 && read_whole_and_part(tensors_, arg(0), arg(1), rank_, ranks_, output_, input_);
      case Verb::kReduceScatter: return count >= 2 && read_whole_and_part(tensors_, arg(1), arg(0), rank_, ranks_, input_, output_) && op_at(2);
      default: return false;
    }
  }

  // What lies `start` bytes into the payloads, into the output.
  void reduce(std::size_t start) {
    for (std::size_t r = 0; r < headers_.size(); ++r) payloads_[r] = payload(r) + start;
    std::optional<WithoutGil> released;
    if (output_.bytes() >= kUnlockedBytes) released.emplace();
    pycomm::reduce(output_.data, payloads_.data(), static_cast<int>(payloads_.size()), output_.numel, output_.dtype, static_cast<ReduceOp>(header_.op), nullptr,
                   false);
  }

  PlainTensors tensors_;
  unsigned char* frame_;
  const int rank_, ranks_;
  std::shared_ptr<shm::Log> log_;
  Way framed_, other_;
  Verb verb_ = Verb::kBarrier;
  Flat input_{}, output_{};  // one, where the call is in place
  Header header_{};
  std::vector<const unsigned char*> headers_;
  std::vector<const void*> payloads_;
};

}  // namespace

void bind_frames(py::module_& m);  // module.cpp

void bind_frames(py::module_& m) {
  py::class_<FrameCall>(m, "FrameCall", "What an ordinary collective does on either side of a swap of frames.")
      .def(py::init<const py::object&, const py::object&, std::uintptr_t, int, int>(), py::arg("tensor"), py::arg("parameter"), py::arg("frame"),
           py::arg("rank"), py::arg("ranks"))
      .def_property_readonly("can_read", &FrameCall::can_read)
      .def("name", &FrameCall::name, py::arg("framed"), py::arg("other"))
      .def("record_on", &FrameCall::record_on, py::arg("log"), py::arg("framed"), py::arg("other"))
      .def("read", &FrameCall::read)
      .def("begin", &FrameCall::begin)
      .def("look_at", &FrameCall::look_at, py::arg("frames"))
      .def("agrees", &FrameCall::agrees)
      .def("finish", &FrameCall::finish)
      .def("end", &FrameCall::end);
}

}  // namespace pycomm
