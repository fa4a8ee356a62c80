#include "shm_errors.h"

#include <new>

#include "../shm/errors.h"

namespace pycomm {
namespace {

thread_local LazyGilRelease* current_release = nullptr;

void raise(const char* name, const char* message, int rank = -1) {
  PyObject* errors = PyImport_ImportModule("pycomm.errors");
  PyObject* type = errors != nullptr ? PyObject_GetAttrString(errors, name) : nullptr;
  PyObject* error = nullptr;
  if (type != nullptr) error = rank >= 0 ? PyObject_CallFunction(type, "si", message, rank) : PyObject_CallFunction(type, "s", message);
  if (error != nullptr) PyErr_SetObject(type, error);
  Py_XDECREF(error);
  Py_XDECREF(type);
  Py_XDECREF(errors);
}

}  // namespace

void set_python_error() {
  try {
    throw;
  } catch (const PythonError&) {
  } catch (const shm::PeerLost& error) {
    raise("PeerLostError", error.what(), error.rank);
  } catch (const shm::Timeout& error) {
    raise("CollectiveTimeoutError", error.what());
  } catch (const shm::Mismatch& error) {
    raise("CollectiveMismatchError", error.what());
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
  if (state_ != nullptr) PyEval_RestoreThread(state_);
}

void LazyGilRelease::about_to_block() {
  if (current_release != nullptr && current_release->state_ == nullptr) current_release->state_ = PyEval_SaveThread();
}

void check_interrupt() {
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool has_raised = PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  if (has_raised) throw PythonError();
}

}  // namespace pycomm
