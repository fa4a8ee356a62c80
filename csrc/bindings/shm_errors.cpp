#include "shm_errors.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <new>

#include "../shm/errors.h"
#include "gil.h"

namespace pycomm {
namespace {

thread_local LazyGilRelease* current_release = nullptr;
thread_local bool has_no_signals = false;

namespace py = pybind11;

void raise(const char* name, const char* message) {
  try {
    PyErr_SetString(py::module_::import("pycomm.errors").attr(name).ptr(), message);
  } catch (py::error_already_set& error) {
    error.restore();
  }
}

// The words are Python's, the same for all transports.
void raise(const shm::Failed& failed) {
  try {
    if (failed.why) failed.why();
    const auto& at = failed.where;
    const py::object error = py::module_::import("pycomm.transport._wording")
                                 .attr("from_native")(failed.kind, py::make_tuple(at.verb, at.seq, at.group, at.rank, at.ranks, at.global_ranks), failed.numbers, failed.calls, at.ranks_there);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  } catch (const PythonError&) {  // by `why`, which says more
  } catch (py::error_already_set& error) {
    error.restore();
  }
}

}  // namespace

void set_python_error() {
  try {
    throw;
  } catch (const PythonError&) {
  } catch (const shm::Failed& error) {
    raise(error);
  } catch (const shm::Broken& error) {
    raise("TransportError", error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    raise("PycommError", error.what());
  }
}

LazyGilRelease::LazyGilRelease(bool now) {
  current_release = this;
  if (now) about_to_block();
}

LazyGilRelease::~LazyGilRelease() {
  current_release = nullptr;
  if (state_ != nullptr) or_wait_for_the_end([this] { PyEval_RestoreThread(state_); });
}

void LazyGilRelease::about_to_block() {
  if (current_release != nullptr && current_release->state_ == nullptr) current_release->state_ = PyEval_SaveThread();
}

WithoutSignals::WithoutSignals() { has_no_signals = true; }

WithoutSignals::~WithoutSignals() { has_no_signals = false; }

void check_interrupt() {
  if (has_no_signals) return;
  const WithGil gil;
  if (PyErr_CheckSignals() != 0) throw PythonError();
}

std::function<void()> asking(PyObject* look) {
  if (look == Py_None) return {};
  const WithGil own_gil;
  Py_INCREF(look);
  const std::shared_ptr<PyObject> held(look, [](PyObject* its) {
    const WithGil gil;
    Py_DECREF(its);
  });
  return [held] {
    const WithGil gil;
    PyObject* const answer = PyObject_CallNoArgs(held.get());
    if (answer == nullptr) throw PythonError();
    Py_DECREF(answer);
  };
}

}  // namespace pycomm
