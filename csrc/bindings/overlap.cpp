// pycomm._native: what a CommStream is made of.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../overlap/progress.h"
#include "../shm/group.h"
#include "gil.h"
#include "shm_call.h"
#include "shm_errors.h"

namespace py = pybind11;

namespace pycomm {
namespace {

using overlap::Agreed;
using overlap::Agreement;
using overlap::Frame;
using overlap::Granted;
using overlap::Progress;
using overlap::Scheduler;

// What Python code raised. The last copy may go in a thread without the lock.
struct Raised : std::exception {
  explicit Raised(py::object raised) : error(new py::object(std::move(raised)), [](py::object* object) {
    const WithGil gil;
    delete object;
  }) {}
  const char* what() const noexcept override { return "the Python part of a stream raised"; }
  std::shared_ptr<py::object> error;
};

// Calls into Python from the stream's thread, which holds the lock.
template <class... Args>
py::object call(const py::object& function, Args&&... args) {
  const py::tuple arguments = py::make_tuple(std::forward<Args>(args)...);
  PyObject* const answer = or_wait_for_the_end([&] { return PyObject_Call(function.ptr(), arguments.ptr(), nullptr); });
  if (answer == nullptr) throw Raised(py::error_already_set().value());
  return py::reinterpret_steal<py::object>(answer);
}

py::bytes bytes_of(const Frame& frame) { return {reinterpret_cast<const char*>(&frame), sizeof frame}; }

// What the loop needs, from Python. Over shared memory it is asked for single segments; elsewhere for everything, and so the
// thread keeps the lock until it rests: each time that it asked anew, it would wait for a computation.
class FromPython : public Progress::Outside {
 public:
  FromPython(std::shared_ptr<shm::Group> group, py::object exchange, py::object refuse, py::object move, py::object collect, py::object end_grant)
      : group_(std::move(group)),
        exchange_(std::move(exchange)),
        refuse_(std::move(refuse)),
        move_(std::move(move)),
        collect_(std::move(collect)),
        end_grant_(std::move(end_grant)) {}

  void exchange(Frame* frames, const Frame& mine) override {
    if (group_ != nullptr) {
      shm::Call call{shm::Verb::kAllGather};
      call.numel = sizeof mine;
      return group_->agree(frames, &mine, sizeof mine, call);
    }
    if (!turn_) turn_.emplace();
    const py::buffer_info all = py::buffer(call(exchange_, bytes_of(mine))).request();
    std::memcpy(frames, all.ptr, static_cast<std::size_t>(all.size * all.itemsize));
  }
  void refuse(std::uint64_t number) override {
    const WithGil gil;
    call(refuse_, number);
  }
  void move(const Granted& granted) override {
    const WithGil gil;
    call(move_, granted.number, granted.segment);
  }
  void ended_unmoved() override {
    if (collect_.is_none()) return;
    const WithGil gil;
    call(collect_);
  }
  void end_grant() override {
    if (end_grant_.is_none()) return;
    const WithGil gil;
    call(end_grant_);
  }
  void rest() override { turn_.reset(); }

 private:
  std::shared_ptr<shm::Group> group_;
  py::object exchange_, refuse_, move_, collect_, end_grant_;
  std::optional<WithGil> turn_;
};

void run(Progress& progress, std::shared_ptr<shm::Group> group, const py::object& exchange, const py::object& refuse, const py::object& move,
         const py::object& collect, const py::object& end_grant) {
  FromPython outside(std::move(group), exchange, refuse, move, collect, end_grant);
  const WithoutGil released;
  const WithoutSignals no_signals;
  try {
    progress.run(outside);
  } catch (...) {
    outside.rest();
    throw;
  }
}

std::uint64_t submit_all_reduce(Progress& progress, std::int64_t priority, std::uint64_t digest, std::size_t segment_numel, std::shared_ptr<shm::Group> group,
                                std::uintptr_t data, std::size_t numel, int dtype, int op, double factor, double timeout_s) {
  const shm::Call whole = make_call(shm::Verb::kAllReduce, numel, dtype, op, factor, 0, timeout_s);
  const std::size_t item = item_bytes(whole.dtype), segments = numel == 0 ? 1 : (numel + segment_numel - 1) / segment_numel;
  const auto move = [=, group = std::move(group)](std::size_t segment) {
    shm::Call part = whole;
    part.numel = std::min(segment_numel, numel - segment * segment_numel);
    void* const at = pointer(data + segment * segment_numel * item);
    group->all_reduce(at, at, part);
  };
  return progress.submit({priority, digest, segments, std::min(segment_numel, numel) * item, move});
}

py::object as_python(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Raised& raised) {
    return *raised.error;
  } catch (...) {
    set_python_error();
  }
  return py::error_already_set().value();
}

py::list as_python(const std::vector<Progress::Ended>& items) {
  py::list ended;
  std::exception_ptr last;  // of a group that broke; many items have it
  py::object raised = py::none();
  for (const Progress::Ended& each : items) {
    if (each.error != last) raised = each.error == nullptr ? py::none() : as_python(each.error);
    last = each.error;
    ended.append(py::make_tuple(each.number, raised));
  }
  return ended;
}

std::vector<Progress::Ended> await_ended(Progress& progress) {
  const WithoutGil released;
  return progress.await_ended();
}

}  // namespace

void bind_overlap(py::module_& m);  // module.cpp

void bind_overlap(py::module_& m) {
  py::class_<Progress>(m, "StreamProgress", "The queue of a stream, and the loop that its thread runs.")
      .def(py::init<int, std::size_t>(), py::arg("ranks"), py::arg("segment_bytes"))
      .def("submit", [](Progress& p, std::int64_t priority, std::uint64_t digest, std::size_t segments, std::size_t segment_bytes) {
             return p.submit({priority, digest, segments, segment_bytes, nullptr});
           })
      .def("submit_all_reduce", &submit_all_reduce)
      .def("run", &run)
      .def("ended", [](Progress& p, std::uint64_t number, std::int64_t start_ns) { p.ended(number, start_ns); })
      .def("collect", [](Progress& p) { return as_python(p.collect()); })
      .def("await_ended", [](Progress& p) { return as_python(await_ended(p)); })
      .def("take_moved", [](Progress& p) {
             const Progress::Moved moved = p.take_moved();
             return py::make_tuple(static_cast<double>(moved.ns) * 1e-9, moved.bytes);
           })
      .def("close", &Progress::close);
  py::class_<Scheduler>(m, "StreamScheduler", "What a stream moves next.")
      .def(py::init<>())
      .def("add", &Scheduler::add, py::arg("priority"), py::arg("segments"), py::arg("segment_bytes"))
      .def("grant", [](Scheduler& s, std::uint64_t agreed, double bytes_per_s) {
             py::list chosen;
             for (const Granted& each : s.grant(agreed, bytes_per_s)) chosen.append(py::make_tuple(each.number, each.segment));
             return chosen;
           })
      .def_property_readonly("has_work", &Scheduler::has_work);
  py::class_<Agreement>(m, "StreamAgreement", "What the ranks of a stream tell one another.")
      .def(py::init<>())
      .def("add", &Agreement::add, py::arg("digest"))
      .def("frame", [](Agreement& a, double bytes_per_s) { return bytes_of(a.frame(bytes_per_s)); })
      .def("agree", [](Agreement& a, const std::vector<std::string>& frames) {
             std::vector<Frame> all(frames.size());
             for (std::size_t r = 0; r < all.size(); ++r) std::memcpy(&all[r], frames[r].data(), std::min(sizeof(Frame), frames[r].size()));
             const Agreed agreed = a.agree(all.data(), all.size());
             return py::make_tuple(agreed.submitted, agreed.bytes_per_s, agreed.refused);
           });
  m.attr("STREAM_FRAME_BYTES") = sizeof(Frame);
  m.attr("STREAM_GRANT_S") = overlap::kGrantS;
}

}  // namespace pycomm
