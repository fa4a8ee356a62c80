// What batch_isend_irecv is made of: pycomm's classes and functions, and where a P2POp has its fields.
#pragma once

#include <pybind11/pybind11.h>

#include "slots.h"

namespace pycomm {

struct BatchKinds {
  enum Field { kOp, kTensor, kPeer, kGroup, kTag, kGroupPeer, kFields };

  PyTypeObject* handle;   // a class that make_handle takes
  PyTypeObject* message;  // P2POp
  PyObject *isend, *irecv;
  Py_ssize_t places[kFields];  // of the slots that a P2POp has

  // What a capsule of batch_kinds() holds; null for any other object.
  static const BatchKinds* of(PyObject* capsule);
  // Null where it was deleted.
  PyObject* field(PyObject* of_message, Field which) const { return in_slot(of_message, places[which]); }
};

void bind_batch_kinds(pybind11::module_& m);

}  // namespace pycomm
