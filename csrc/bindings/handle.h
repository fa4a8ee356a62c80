// pycomm._native.ShmHandle: a message or a started call under way as Python has it, and the native part of the handles that users get.
//
// An exchange of two small messages takes 0.7 us, and handles written in Python took three times as long as that. So
// `pycomm.isend` answers an object of a Python class derived from this type: what everybody does with a handle, to wait
// and to drop it, is native, the rest Python (pycomm/collectives/lazy_work.py).
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <variant>

#include "../shm/group.h"
#include "../shm/mailbox.h"

namespace pycomm {

void bind_handle(pybind11::module_& m);

using Underway = std::variant<std::shared_ptr<shm::Message>, std::shared_ptr<shm::Started>>;

// A handle of `type`, ShmHandle (if null) or derived from it, that keeps `value`, the caller's tensor, alive, and `input` if there is another
// one. `group` is pycomm's own, which the methods in Python ask; null for a transport's request. Null, and a Python error set, if it can't
// be made.
PyObject* make_handle(PyTypeObject* type, std::shared_ptr<shm::Group> native, Underway underway, PyObject* value, PyObject* group,
                      PyObject* input = nullptr);

// Whether what a handle is of has ended, well or not. No Python error is left.
bool has_ended(PyObject* handle);

// Whether `object` is a type that make_handle takes.
bool is_handle_type(PyObject* object);

}  // namespace pycomm
