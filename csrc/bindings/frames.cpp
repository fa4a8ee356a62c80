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
#include "tensor_list.h"

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

  // A call of `verb`, as csrc/shm/group.h numbers them, with the user's own arguments, lists of tensors if `has_lists`. Returns how
  // many bytes its frames have to have room for, on every rank the same; -1, and nothing has happened, if that is more than `most` or the
  // short cut cannot take the arguments.
  std::int64_t read(int verb, bool has_lists, std::int64_t most, const py::args& args) {
    header_ = {};
    header_.verb = static_cast<std::uint8_t>(verb);
    header_.factor = 1.0;
    verb_ = static_cast<Verb>(verb);
    part_ = {};
    is_list_ = has_lists;
    const std::int64_t bytes = read_arguments(args) ? static_cast<std::int64_t>(blocks_sent() * part_.bytes()) : -1;
    header_.dtype = static_cast<std::uint8_t>(part_.dtype);
    header_.numel = static_cast<std::int64_t>(part_.numel);
    if (bytes >= 0 && bytes <= most) return bytes;
    list_.let_go();
    return -1;
  }

  // The call begins, as the group's number `seq`: writes the board and the frame, and returns how much of that counts.
  std::size_t begin(bool is_framed, std::uint64_t seq) {
    const Way& way = is_framed ? framed_ : other_;
    if (log_) {
      const std::uint8_t flags = is_framed ? shm::kIsPlan : 0;
      const std::size_t bytes = (has_parts() ? static_cast<std::size_t>(ranks_) : 1) * part_.bytes();
      log_->begin({header_.verb, header_.op, header_.dtype, flags, way.number, header_.root, part_.numel, bytes}, seq, log_->ticks());
    }
    std::memcpy(header_.algorithm, way.name, sizeof way.name);
    std::memcpy(frame_, &header_, sizeof header_);
    const bool is_silent = !is_framed || ((verb_ == Verb::kBroadcast || verb_ == Verb::kScatter) && header_.root != rank_);
    const std::size_t sent = is_silent ? 0 : blocks_sent();
    unsigned char* to = frame_ + kPayloadAt;
    for (std::size_t i = 0; i < sent && part_.numel > 0; ++i, to += part_.bytes()) std::memcpy(to, input_(i), part_.bytes());
    return static_cast<std::size_t>(to - frame_);
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

  // Makes the result of all ranks' payloads, in rank order, in the user's tensors.
  void finish() {
    const auto root = static_cast<std::size_t>(header_.root), mine = static_cast<std::size_t>(rank_);
    const bool is_root = root == mine;
    switch (verb_) {
      case Verb::kAllReduce: return reduce(0);
      case Verb::kReduce: return is_root ? reduce(0) : void();
      case Verb::kReduceScatter: return reduce(mine * part_.bytes());
      case Verb::kBroadcast: return is_root ? void() : take(0, payload(root));
      case Verb::kScatter: return take(0, payload(root) + mine * part_.bytes());
      case Verb::kAllGather:
      case Verb::kGather:
        for (std::size_t r = 0; r < headers_.size() && (is_root || verb_ == Verb::kAllGather); ++r) take(r, payload(r));
        return;
      default: return;  // a barrier
    }
  }

  void end(bool has_failed) {
    list_.let_go();
    if (!log_) return;
    if (has_failed) log_->fail();
    log_->end();
  }

 private:
  using Verb = shm::Verb;

  static unsigned char* pointer(std::uintptr_t address) { return reinterpret_cast<unsigned char*>(address); }
  const unsigned char* payload(std::size_t rank) const { return headers_[rank] + kPayloadAt; }

  bool has_parts() const { return verb_ != Verb::kAllReduce && verb_ != Verb::kReduce && verb_ != Verb::kBroadcast; }  // of a whole
  std::size_t blocks_sent() const { return verb_ == Verb::kReduceScatter || verb_ == Verb::kScatter ? static_cast<std::size_t>(ranks_) : 1; }

  bool read_arguments(const py::args& args) {
    const std::size_t count = args.size();
    const auto arg = [&](std::size_t i) { return PyTuple_GET_ITEM(args.ptr(), static_cast<Py_ssize_t>(i)); };
    const auto op_at = [&](std::size_t i) {
      ReduceOp op;
      if (count > i + 1 || !read_op(count > i ? arg(i) : nullptr, part_.dtype, op)) return false;
      header_.op = static_cast<std::uint8_t>(op);
      return true;
    };
    const auto root_at = [&](std::size_t i) { return count > i && read_rank(arg(i), ranks_, header_.root); };
    switch (verb_) {
      case Verb::kBarrier: return count == 0;
      case Verb::kAllReduce: return count >= 1 && read_in_place(arg(0)) && op_at(1);
      case Verb::kReduce: return count >= 2 && read_in_place(arg(0)) && root_at(1) && op_at(2);
      case Verb::kBroadcast: return count == 2 && read_in_place(arg(0)) && root_at(1);
      case Verb::kAllGather: return count == 2 && read_blocks(arg(0), arg(1), /*are_written=*/true);
      case Verb::kReduceScatter: return count >= 2 && read_blocks(arg(1), arg(0), /*are_written=*/false) && op_at(2);
      case Verb::kGather:
      case Verb::kScatter: {
        if (count < 1 || count > 3 || (count > 2 && !root_at(2))) return false;
        PyObject* const given = count > 1 ? arg(1) : Py_None;
        if (header_.root == rank_) return read_blocks(given, arg(0), verb_ == Verb::kGather);
        return given == Py_None && read_in_place(arg(0));
      }
      default: return false;
    }
  }

  bool read_in_place(PyObject* object) {
    if (!tensors_.read(object, part_)) return false;
    input_ = output_ = shm::Blocks(part_.data, 0);
    return true;
  }

  // A part, and blocks of which there is one a rank: in one tensor, or in a list. The part may be its own rank's block.
  bool read_blocks(PyObject* blocks, PyObject* part, bool are_written) {
    Flat whole;
    if (is_list_) {
      if (!tensors_.read(part, part_) || !list_.read(tensors_, ranks_, blocks, part_) || !list_.are_apart_from(part_, rank_)) return false;
      if (are_written && !list_.are_apart()) return false;
    } else if (!read_whole_and_part(tensors_, blocks, part, rank_, ranks_, whole, part_)) {
      return false;
    }
    const shm::Blocks all = is_list_ ? shm::Blocks(list_.data()) : shm::Blocks(whole.data, part_.bytes()), one(part_.data, 0);
    input_ = are_written ? one : all;
    output_ = are_written ? all : one;
    return true;
  }

  void take(std::size_t r, const unsigned char* from) { std::memcpy(output_(r), from, part_.bytes()); }

  // What lies `start` bytes into the payloads, into the output.
  void reduce(std::size_t start) {
    for (std::size_t r = 0; r < headers_.size(); ++r) payloads_[r] = payload(r) + start;
    std::optional<WithoutGil> released;
    if (part_.bytes() >= kUnlockedBytes) released.emplace();
    pycomm::reduce(output_(0), payloads_.data(), static_cast<int>(payloads_.size()), part_.numel, part_.dtype, static_cast<ReduceOp>(header_.op), nullptr,
                   false);
  }

  PlainTensors tensors_;
  unsigned char* frame_;
  const int rank_, ranks_;
  std::shared_ptr<shm::Log> log_;
  Way framed_, other_;
  Verb verb_ = Verb::kBarrier;
  bool is_list_ = false;
  Flat part_{};                                    // a part of one rank; the whole tensor, where there is no other
  shm::Blocks input_{nullptr, 0}, output_{nullptr, 0};  // one, or one a rank, each as long as the part
  TensorList list_;
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
