#include "handle.h"

#include <structmember.h>

#include <cstddef>
#include <new>
#include <utility>

#include "gil.h"
#include "shm_call.h"
#include "shm_errors.h"

namespace pycomm {
namespace {

using shm::Group;
using shm::Message;
using shm::Started;

// A message, or a call that was started, of `group`.
std::size_t bytes_of(const Message& message) { return message.bytes; }
std::size_t bytes_of(const Started& call) { return call.bytes; }
bool test(Group& group, const std::shared_ptr<Message>& message) { return group.mailbox().test(message); }
bool test(Group& group, const std::shared_ptr<Started>& call) { return group.test(*call); }
// `timeout_ns` is 0 where the caller named none.
void wait(Group& group, const std::shared_ptr<Message>& message, std::int64_t timeout_ns) {
  group.mailbox().wait(message, timeout_ns > 0 ? timeout_ns : group.timeout_ns());
}
void wait(Group& group, const std::shared_ptr<Started>& call, std::int64_t timeout_ns) { group.wait(*call, timeout_ns); }
bool has_failed(const Message& message) { return message.error != nullptr; }
bool has_failed(const Started& call) { return call.has_ended() && call.error != nullptr; }
int peer_of(const Message& message) { return message.peer; }
int peer_of(const Started&) { return -1; }
const char* verb_of(const Message& message) { return message.is_send ? "isend" : "irecv"; }
const char* verb_of(const Started& call) { return shm::verb_name(call.verb); }

struct Handle {
  PyObject_HEAD
  std::shared_ptr<Group> native;
  Underway underway;
  PyObject* value;
  PyObject* input;
  PyObject* group;
  PyObject* error;   // what it has ended with, if not well
  PyObject* future;  // made in Python, for who wants one
  char is_done;      // and this handle knows it
  char is_asked;     // somebody has been told of the error
};

PyTypeObject* base_type = nullptr;
PyObject* name_timeout = nullptr;
PyObject* name_tell_future = nullptr;
PyObject* name_left = nullptr;

Handle& handle_of(PyObject* self) { return *reinterpret_cast<Handle*>(self); }

// What `ask` says of what it is of.
template <class Ask>
auto of(const Handle& handle, Ask ask) {
  return std::visit(ask, handle.underway);
}

bool is_long(const Handle& handle) {
  return of(handle, [](const auto& its) { return bytes_of(*its); }) >= kUnlockedBytes;
}

// False, and a Python error set, if it can't be told.
bool end(PyObject* self) {
  Handle& handle = handle_of(self);
  handle.is_done = 1;
  if (handle.future == nullptr || handle.future == Py_None) return true;
  PyObject* const told = PyObject_CallMethodNoArgs(self, name_tell_future);
  Py_XDECREF(told);
  return told != nullptr;
}

// For the C++ exception that was thrown. False, and the Python error set, where it has not failed: only the time to wait was over.
bool end_by_error(PyObject* self) {
  Handle& handle = handle_of(self);
  set_python_error();
  if (!of(handle, [](const auto& its) { return has_failed(*its); })) return false;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Py_DECREF(type);
  Py_XDECREF(traceback);
  if (handle.error == nullptr) handle.error = value;  // else another thread has heard it first
  else Py_DECREF(value);
  return end(self);
}

PyObject* raise_error(Handle& handle) {
  handle.is_asked = 1;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(handle.error)), handle.error);
  return nullptr;
}

// Moves what can be moved. False, and a Python error set, if that fails for a reason that is not its own.
bool look(PyObject* self) {
  const Handle& handle = handle_of(self);
  if (handle.is_done) return true;
  try {
    bool is_done = false;
    {
      const LazyGilRelease release(is_long(handle));
      is_done = of(handle, [&](const auto& its) { return test(*handle.native, its); });
    }
    return !is_done || end(self);
  } catch (...) {
    return end_by_error(self);
  }
}

PyObject* is_completed(PyObject* self, PyObject*) {
  return look(self) ? PyBool_FromLong(handle_of(self).is_done) : nullptr;
}

PyObject* test_handle(PyObject* self, PyObject*) {
  Handle& handle = handle_of(self);
  if (!look(self)) return nullptr;
  return handle.error != nullptr ? raise_error(handle) : PyBool_FromLong(handle.is_done);
}

// What `wait` was given: nothing, or what pycomm.config.limit_s makes seconds or nothing of. False, and a Python error set, if that does not.
bool read_timeout(PyObject* const* args, Py_ssize_t count, PyObject* keywords, std::int64_t& timeout_ns) {
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  if (count + named > 1 || (named == 1 && PyUnicode_Compare(PyTuple_GET_ITEM(keywords, 0), name_timeout) != 0)) {
    PyErr_SetString(PyExc_TypeError, "wait() takes one argument, timeout");
    return false;
  }
  if (count + named == 0 || args[0] == Py_None) return true;
  try {
    const pybind11::object limit_s = pybind11::module_::import("pycomm.config").attr("limit_s")(pybind11::handle(args[0]));
    if (!limit_s.is_none()) timeout_ns = nanoseconds(limit_s.cast<double>());
  } catch (pybind11::error_already_set& error) {
    error.restore();
    return false;
  }
  return true;
}

PyObject* wait_for_handle(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  Handle& handle = handle_of(self);
  std::int64_t timeout_ns = 0;
  if (!read_timeout(args, count, keywords, timeout_ns)) return nullptr;
  if (!handle.is_done) {
    try {
      {
        const LazyGilRelease release(is_long(handle));
        of(handle, [&](const auto& its) { wait(*handle.native, its, timeout_ns); });
      }
      if (!end(self)) return nullptr;
    } catch (...) {
      if (!end_by_error(self)) return nullptr;  // a signal handler raised, or time is over, and it is still under way
    }
  }
  if (handle.error != nullptr) return raise_error(handle);
  Py_RETURN_TRUE;
}

PyObject* source_of(PyObject* self, void*) {
  return PyLong_FromLong(of(handle_of(self), [](const auto& its) { return peer_of(*its); }));
}
PyObject* name_of(PyObject* self, void*) {
  return PyUnicode_InternFromString(of(handle_of(self), [](const auto& its) { return verb_of(*its); }));
}

PyObject* refuse(PyTypeObject*, PyObject*, PyObject*) {
  PyErr_SetString(PyExc_TypeError, "handles are made by isend, irecv, and calls with async_op=True");
  return nullptr;
}

// Whether the interpreter is: then no error can be worded any more, and the transports have closed.
bool is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Of a user's handle that is dropped before it has ended, or before anybody heard of the error.
void finalize(PyObject* self) {
  const Handle& handle = handle_of(self);
  if (handle.group == nullptr || is_ending() || handle.native->is_in_child() || (handle.is_done && (handle.error == nullptr || handle.is_asked))) return;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  bool is_well = look(self);
  if (is_well && !(handle.is_done && handle.error == nullptr)) {
    PyObject* const left = PyObject_CallMethodNoArgs(self, name_left);
    Py_XDECREF(left);
    is_well = left != nullptr;
  }
  if (!is_well) PyErr_WriteUnraisable(self);
  PyErr_Restore(type, value, traceback);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  const Handle& handle = handle_of(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(handle.value);
  Py_VISIT(handle.input);
  Py_VISIT(handle.group);
  Py_VISIT(handle.error);
  Py_VISIT(handle.future);
  return 0;
}

// The tensors stay: it may still be under way.
int clear(PyObject* self) {
  Handle& handle = handle_of(self);
  Py_CLEAR(handle.error);
  Py_CLEAR(handle.future);
  return 0;
}

void destroy_handle(PyObject* self) {
  Handle& handle = handle_of(self);
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  std::destroy_at(&handle.native);
  std::destroy_at(&handle.underway);
  Py_XDECREF(handle.value);
  Py_XDECREF(handle.input);
  Py_XDECREF(handle.group);
  type->tp_free(self);
  Py_DECREF(type);
}

PyCFunction method(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"is_completed", is_completed, METH_NOARGS, "See Work.is_completed."},
    {"wait", method(wait_for_handle), METH_FASTCALL | METH_KEYWORDS, "See Work.wait and Request.wait."},
    {"test", test_handle, METH_NOARGS, "See Request.test."},
    {"settle", method(wait_for_handle), METH_FASTCALL | METH_KEYWORDS, "See Request.settle."},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef properties[] = {
    {"source", source_of, nullptr, "The rank that sent the message; -1 of a call, and until it has come, if any rank may.", nullptr},
    {"_verb", name_of, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyMemberDef members[] = {
    {"_value", T_OBJECT, offsetof(Handle, value), READONLY, nullptr},
    {"_group", T_OBJECT, offsetof(Handle, group), READONLY, nullptr},
    {"_error", T_OBJECT, offsetof(Handle, error), READONLY, nullptr},
    {"_future", T_OBJECT, offsetof(Handle, future), 0, nullptr},
    {"_is_done", T_BOOL, offsetof(Handle, is_done), READONLY, nullptr},
    {"_is_asked", T_BOOL, offsetof(Handle, is_asked), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(refuse)},
    {Py_tp_finalize, reinterpret_cast<void*>(finalize)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy_handle)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_members, members},
    {0, nullptr},
};
PyType_Spec spec{"pycomm._native.ShmHandle", sizeof(Handle), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

}  // namespace

PyObject* make_handle(PyTypeObject* type, std::shared_ptr<Group> native, Underway underway, PyObject* value, PyObject* group,
                      PyObject* input) {
  if (type == nullptr) type = base_type;
  PyObject* const self = type->tp_alloc(type, 0);  // zeros
  if (self == nullptr) return nullptr;
  Handle& handle = handle_of(self);
  new (&handle.native) std::shared_ptr<Group>(std::move(native));
  new (&handle.underway) Underway(std::move(underway));
  handle.value = Py_NewRef(value);
  handle.input = Py_XNewRef(input);
  handle.group = Py_XNewRef(group);
  return self;
}

bool has_ended(PyObject* handle) {
  if (!look(handle)) PyErr_Clear();
  return handle_of(handle).is_done != 0;
}

bool is_handle_type(PyObject* object) { return PyType_Check(object) && PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(object), base_type); }

void bind_handle(pybind11::module_& m) {
  base_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  name_timeout = PyUnicode_InternFromString("timeout");
  name_tell_future = PyUnicode_InternFromString("_tell_future");
  name_left = PyUnicode_InternFromString("_left");
  if (base_type == nullptr || name_timeout == nullptr || name_tell_future == nullptr || name_left == nullptr) throw pybind11::error_already_set();
  m.add_object("ShmHandle", pybind11::reinterpret_borrow<pybind11::object>(reinterpret_cast<PyObject*>(base_type)));
}

}  // namespace pycomm
