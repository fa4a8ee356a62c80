// Messages of the shared-memory transport as Python has them.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "../shm/group.h"
#include "plain_tensor.h"

namespace pycomm {

// What a short cut needs beside its arguments. Owned by the capsule that is the C function's `self`.
struct Cut {
  std::shared_ptr<shm::Group> group;
  PlainTensors tensors;
  pybind11::list left;  // messages that a blocking call did not wait for to the end: their memory may yet be written
};

inline Cut& cut_of(PyObject* self) { return *static_cast<Cut*>(PyCapsule_GetPointer(self, nullptr)); }

// Starts a message; its handle (handle.h) keeps `tensor` alive. Null, and a Python error set, if it can't be started.
PyObject* start_message(std::shared_ptr<shm::Group> group, bool is_send, void* data, std::size_t bytes, int peer, std::int64_t tag,
                        PyObject* tensor);

// The short cuts send, recv, isend and irecv: of a plain tensor, a rank of the group (any, for None), and a tag. `recv` answers the rank
// that sent it; the last two, which take a class of handles and pycomm's Group besides, a handle.
PyObject* fast_send(PyObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* fast_recv(PyObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* fast_isend(PyObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* fast_irecv(PyObject* self, PyObject* const* args, Py_ssize_t count);
// batch_isend_irecv: of a list of plain P2POps, of batch_kinds(), of pycomm's Group, and of its global ranks unless it is the default group.
// Answers the list of their handles; all are read before one is started.
PyObject* fast_batch(PyObject* self, PyObject* const* args, Py_ssize_t count);

}  // namespace pycomm
