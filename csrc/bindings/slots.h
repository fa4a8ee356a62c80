// Attributes that lie in the slots of a Python class (`__slots__`), read where they lie. Python looks each up by its name, in 10 ns.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

namespace pycomm {

// Where the objects of `type` have the slot `name`; 0, and no Python error set, if that is none.
inline Py_ssize_t place_of_slot(PyTypeObject* type, PyObject* name) {
  if (type->tp_getattro != PyObject_GenericGetAttr) return 0;
  PyObject* const descriptor = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name);
  if (descriptor == nullptr) PyErr_Clear();
  const bool is_slot = descriptor != nullptr && Py_TYPE(descriptor) == &PyMemberDescr_Type;
  const PyMemberDef* const member = is_slot ? reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member : nullptr;
  const Py_ssize_t place = member != nullptr && member->type == T_OBJECT_EX ? member->offset : 0;
  Py_XDECREF(descriptor);
  return place;
}

// A borrowed reference; null if the slot is empty.
inline PyObject* in_slot(PyObject* object, Py_ssize_t place) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + place);
}

// One attribute of objects that are usually of the same class.
class Attribute {
 public:
  explicit Attribute(PyObject* name) : name_(Py_NewRef(name)) { PyUnicode_InternInPlace(&name_); }
  ~Attribute() {
    Py_DECREF(name_);
    Py_XDECREF(type_);
  }
  Attribute(const Attribute&) = delete;
  Attribute& operator=(const Attribute&) = delete;

  // A new reference, or null and a Python error set.
  PyObject* of(PyObject* object) {
    if (Py_TYPE(object) != type_) look_at(Py_TYPE(object));
    PyObject* const found = place_ != 0 ? in_slot(object, place_) : nullptr;
    return found != nullptr ? Py_NewRef(found) : PyObject_GetAttr(object, name_);
  }

 private:
  void look_at(PyTypeObject* type) {
    place_ = place_of_slot(type, name_);
    Py_INCREF(type);
    Py_XSETREF(type_, type);
  }

  PyObject* name_;
  PyTypeObject* type_ = nullptr;  // held, so that no other class is made in its place
  Py_ssize_t place_ = 0;
};

}  // namespace pycomm
