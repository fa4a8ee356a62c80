// pycomm._native: the shared-memory transport.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "../shm/board.h"
#include "../shm/errors.h"
#include "../shm/group.h"
#include "../shm/process.h"
#include "batch_kinds.h"
#include "gil.h"
#include "handle.h"
#include "shm_call.h"
#include "shm_errors.h"
#include "shm_fast.h"
#include "shm_messages.h"

namespace py = pybind11;

namespace pycomm {
namespace {

using shm::Call;
using shm::Group;
using shm::Heaps;
using shm::Verb;

// A block of the shared heap, given back when Python drops it.
struct Block {
  std::shared_ptr<Heaps> heaps;
  void* data;
  std::size_t bytes;
  Block(std::shared_ptr<Heaps> heaps_, std::size_t bytes_) : heaps(std::move(heaps_)), data(heaps->allocate(bytes_)), bytes(bytes_) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { heaps->free(data); }
};

// Where each rank's part of `numel` elements begins in the flat buffer at `address`.
std::vector<void*> blocks_of(const Group& group, std::uintptr_t address, std::size_t numel, int dtype) {
  std::vector<void*> blocks;
  for (int r = 0; r < group.ranks(); ++r)
    blocks.push_back(pointer(address + static_cast<std::size_t>(r) * numel * item_bytes(static_cast<DType>(dtype))));
  return blocks;
}

// Returns what calls `look`, a Python function of whom a wait is for and of what says whether that has come.
shm::LookElsewhere looking_by(const py::function& look) {
  const std::shared_ptr<PyObject> held(look.inc_ref().ptr(), [](PyObject* its) {
    const WithGil gil;
    Py_DECREF(its);
  });
  return [held](int whom, const std::function<bool()>& has_come) {
    const WithGil gil;
    const py::cpp_function asked(has_come);
    PyObject* const answer = PyObject_CallFunction(held.get(), "iO", whom, asked.ptr());
    if (answer == nullptr) throw PythonError();
    Py_DECREF(answer);
  };
}

// Rows of `row` elements each, or of `call.numel` if that is 0.
shm::Blocks rows_of(const void* first, std::size_t row, const Call& call) {
  return {first, (row > 0 ? row : call.numel) * item_bytes(call.dtype)};
}

using PartOf = std::tuple<std::vector<int>, int, std::vector<int>>;
shm::Whole whole_of(PartOf part) { return {std::move(std::get<0>(part)), std::get<1>(part), std::move(std::get<2>(part))}; }

using NoGil = py::call_guard<WithoutGil>;

void bind_group(py::module_& m) {
  py::class_<Group, std::shared_ptr<Group>>(m, "ShmGroup", "The ranks of one group on this host. Addresses are those of flat CPU buffers.")
      .def(py::init([](int fd, int host_ranks, std::uint64_t area, int rank, std::vector<int> host_rank_of, std::vector<int> pidfds,
                       std::vector<int> pids, std::string name, std::uint64_t members, double timeout_s, int ranks_per_core,
                       std::shared_ptr<Heaps> heaps, const py::object& look, PartOf maker) {
             const int ranks = static_cast<int>(host_rank_of.size());
             return std::make_shared<Group>(Group::Setup{fd, host_ranks, area, rank, ranks, std::move(host_rank_of), std::move(pidfds),
                                                         std::move(pids), std::move(name), members, nanoseconds(timeout_s), ranks_per_core,
                                                         std::move(heaps), LazyGilRelease::about_to_block, check_interrupt, asking(look.ptr()),
                                                         whole_of(std::move(maker))});
           }),
           py::arg("fd"), py::arg("host_ranks"), py::arg("area"), py::arg("rank"), py::arg("host_rank_of"), py::arg("pidfds"), py::arg("pids"),
           py::arg("name"), py::arg("members"), py::arg("timeout_s"), py::arg("ranks_per_core"), py::arg("heaps"), py::arg("look"),
           py::arg("maker"), NoGil())
      .def("short_cuts", &short_cuts, py::arg("tensor"), py::arg("parameter"))
      .def("all_reduce",
           [](Group& g, std::uintptr_t output, std::uintptr_t input, std::size_t numel, int dtype, int op, double factor, double timeout_s) {
             g.all_reduce(pointer(output), pointer(input), make_call(Verb::kAllReduce, numel, dtype, op, factor, 0, timeout_s));
           }, NoGil())
      .def("reduce",
           [](Group& g, std::uintptr_t output, std::uintptr_t input, std::size_t numel, int dtype, int op, double factor, int root, double timeout_s) {
             g.reduce(pointer(output), pointer(input), make_call(Verb::kReduce, numel, dtype, op, factor, root, timeout_s));
           }, NoGil())
      .def("reduce_scatter",
           [](Group& g, std::uintptr_t output, std::uintptr_t input, std::size_t numel, std::size_t row, int dtype, int op, double factor, double timeout_s) {
             const Call call = make_call(Verb::kReduceScatter, numel, dtype, op, factor, 0, timeout_s);
             g.reduce_scatter(pointer(output), rows_of(pointer(input), row, call), call);
           }, NoGil())
      .def("broadcast",
           [](Group& g, std::uintptr_t data, std::size_t numel, int dtype, int root, double timeout_s) {
             g.broadcast(pointer(data), make_call(Verb::kBroadcast, numel, dtype, 0, 1, root, timeout_s));
           }, NoGil())
      .def("all_gather",
           [](Group& g, std::uintptr_t output, std::uintptr_t input, std::size_t numel, std::size_t row, int dtype, double timeout_s) {
             const Call call = make_call(Verb::kAllGather, numel, dtype, 0, 1, 0, timeout_s);
             g.all_gather(rows_of(pointer(output), row, call), pointer(input), call);
           }, NoGil())
      .def("gather",
           [](Group& g, std::uintptr_t output, std::uintptr_t input, std::size_t numel, int dtype, int root, double timeout_s) {
             const auto outputs = blocks_of(g, output, numel, dtype);
             g.gather(outputs.data(), pointer(input), make_call(Verb::kGather, numel, dtype, 0, 1, root, timeout_s));
           }, NoGil())
      .def("scatter",
           [](Group& g, std::uintptr_t output, std::uintptr_t input, std::size_t numel, int dtype, int root, double timeout_s) {
             const auto inputs = blocks_of(g, input, numel, dtype);
             g.scatter(pointer(output), inputs.data(), make_call(Verb::kScatter, numel, dtype, 0, 1, root, timeout_s));
           }, NoGil())
      .def("all_to_all",
           [](Group& g, std::uintptr_t output, std::uintptr_t input, const std::vector<std::size_t>& output_splits,
              const std::vector<std::size_t>& input_splits, int dtype, double timeout_s) {
             const auto ranks = static_cast<std::size_t>(g.ranks());
             if (output_splits.size() != ranks || input_splits.size() != ranks) throw std::invalid_argument("splits: one entry a rank");
             const Call call = make_call(Verb::kAllToAll, 0, dtype, 0, 1, 0, timeout_s);
             g.all_to_all(pointer(output), pointer(input), output_splits.data(), input_splits.data(), call);
           }, NoGil())
      .def("barrier",
           [](Group& g, double timeout_s) {
             Call call{Verb::kBarrier};
             call.timeout_ns = nanoseconds(timeout_s);
             g.barrier(call);
           }, NoGil())
      .def("drain", [](Group& g, double timeout_s) { return g.drain(nanoseconds(timeout_s)); }, NoGil())
      .def("start_message",
           [](std::shared_ptr<Group> g, bool is_send, std::uintptr_t data, std::size_t bytes, int peer, std::int64_t tag, const py::object& tensor) {
             PyObject* const message = start_message(std::move(g), is_send, pointer(data), bytes, peer, tag, tensor.ptr());
             if (message == nullptr) throw py::error_already_set();
             return py::reinterpret_steal<py::object>(message);
           })
      .def("agree",
           [](Group& g, std::uintptr_t output, std::uintptr_t input, std::size_t bytes, int verb, int op, int dtype, int root, std::size_t numel, double timeout_s) {
             Call call{static_cast<Verb>(verb)};
             call.op = static_cast<ReduceOp>(op);
             call.dtype = static_cast<DType>(dtype);
             call.root = root;
             call.numel = numel;
             call.timeout_ns = nanoseconds(timeout_s);
             call.is_plan = true;
             g.agree(pointer(output), pointer(input), bytes, call);
           }, NoGil())
      .def("abandon", &Group::abandon)
      .def("check_lost", &Group::check_lost, py::arg("doing"))
      .def("record_on", &Group::record_on, py::arg("log"))
      .def("set_name", &Group::set_name, py::arg("name"))
      .def("tell_making", &Group::tell_making, py::arg("ranks"), py::arg("key"))
      .def("made_by", &Group::made_by, py::arg("rank"))
      .def("ended", &Group::ended)
      .def("is_part_of", [](Group& g, PartOf whole) { g.is_part_of(whole_of(std::move(whole))); }, py::arg("whole"))
      .def("look_elsewhere_by", [](Group& g, const py::function& look, bool always) { g.look_elsewhere_by(looking_by(look), always); },
           py::arg("look"), py::arg("always"))
      .def("tell_going_on", &Group::tell_going_on)
      .def_property_readonly("is_broken", &Group::is_broken)
      .def_property_readonly(
          "failure",
          [](const Group& g) -> py::object {
            const auto found = g.failure();
            if (!found) return py::none();
            constexpr const char* kKinds[] = {"", "lost", "timeout", "closed", "interrupted"};  // as in _wording.py
            return py::make_tuple(kKinds[static_cast<int>(found->kind)], found->culprit);
          })
      .def("set_timeout", [](Group& g, double timeout_s) { g.set_timeout(nanoseconds(timeout_s)); }, py::arg("timeout_s"))
      .def("area_of_child",
           [](Group& g, int leader, std::uint64_t key, const py::object& look) { return g.area_of_child(leader, key, asking(look.ptr())); },
           py::arg("leader"), py::arg("key"), py::arg("look"), NoGil())
      .def("close", &Group::close, NoGil())
      .def_property_readonly("line_ns", &Group::line_ns);
}

}  // namespace

void bind_shm(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const PythonError&) {
      set_python_error();
    } catch (const shm::Failed&) {
      set_python_error();
    } catch (const shm::Broken&) {
      set_python_error();
    }
  });
  bind_handle(m);
  bind_batch_kinds(m);
  py::class_<Block>(m, "ShmBlock", py::buffer_protocol(), "A block of this rank's shared heap.")
      .def_buffer([](Block& b) { return py::buffer_info(static_cast<unsigned char*>(b.data), static_cast<py::ssize_t>(b.bytes)); });
  py::class_<Heaps, std::shared_ptr<Heaps>>(m, "ShmHeaps", "The shared heaps of the ranks of this host.")
      .def(py::init<int, int, int>(), py::arg("fd"), py::arg("host_ranks"), py::arg("host_rank"))
      .def("allocate", [](std::shared_ptr<Heaps> heaps, std::size_t bytes) { return std::make_unique<Block>(std::move(heaps), bytes); }, NoGil());
  bind_group(m);
  m.def(
      "look_at_process",
      [](int pid) {
        const shm::Process found = shm::look_at(pid);
        const bool is_there = found.state != '\0' && !found.has_ended() && !found.is_being_ended();
        return py::make_tuple(is_there ? std::string(1, found.state) : std::string(), found.start);
      },
      py::arg("pid"), "A process's state as the kernel has it, \"\" if it has ended or is being ended, and when it was started.");
  m.def("is_dead", &shm::is_dead, py::arg("pidfd"), py::arg("pid"), "Whether a process has ended or is being ended.");
  m.def("exit_status", &shm::exit_status, py::arg("pidfd"), py::arg("pid"), "How a process ended, as os.waitpid encodes it; -1 if nobody knows.");
  m.def("know_torch_operators", &know_torch_operators, py::arg("operators"), "torch's, at the places of ours, for the short cuts.");
  m.attr("SHM_MAX_RANKS") = shm::kMaxRanks;
  m.attr("SHM_LAST_TAG") = shm::kLastTag;
  m.def("shm_create_memory", &shm::create_memory, py::arg("ranks"), "A sealed memfd for the ranks of a host; returns its descriptor.");
  m.def("shm_check_memory", &shm::check_memory, py::arg("fd"), py::arg("ranks"), "Raises unless the descriptor is such a memfd.");
}

}  // namespace pycomm
