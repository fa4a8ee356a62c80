#include "shm_messages.h"

#include <memory>
#include <new>
#include <utility>

#include "../shm/mailbox.h"
#include "gil.h"
#include "shm_call.h"
#include "shm_errors.h"

namespace pycomm {
namespace {

using shm::Group;
using shm::Message;

struct MessageObject {
  PyObject_HEAD
  std::shared_ptr<Group> group;
  std::shared_ptr<Message> message;
  PyObject* tensor;
};

PyTypeObject* message_type = nullptr;

MessageObject& message_of(PyObject* self) { return *reinterpret_cast<MessageObject*>(self); }

PyObject* test_message(PyObject* self, PyObject*) {
  const MessageObject& object = message_of(self);
  bool is_done = false;
  try {
    const LazyGilRelease release(object.message->bytes >= kUnlockedBytes);
    is_done = object.group->mailbox().test(object.message);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  return PyBool_FromLong(is_done);
}

PyObject* wait_for_message(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const MessageObject& object = message_of(self);
  std::int64_t timeout_ns = object.group->timeout_ns();
  if (count > 1) return PyErr_Format(PyExc_TypeError, "wait() takes at most 1 argument (%zd given)", count);
  if (count == 1 && args[0] != Py_None) {
    const double timeout_s = PyFloat_AsDouble(args[0]);
    if (timeout_s == -1.0 && PyErr_Occurred() != nullptr) return nullptr;
    timeout_ns = nanoseconds(timeout_s);
  }
  try {
    const LazyGilRelease release(object.message->bytes >= kUnlockedBytes);
    object.group->mailbox().wait(object.message, timeout_ns);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* source_of(PyObject* self, void*) { return PyLong_FromLong(message_of(self).message->peer); }

void destroy_message(PyObject* self) {
  MessageObject& object = message_of(self);
  PyTypeObject* const type = Py_TYPE(self);
  std::destroy_at(&object.group);
  std::destroy_at(&object.message);
  Py_XDECREF(object.tensor);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"test", test_message, METH_NOARGS, "See Request.test."},
    {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(wait_for_message)), METH_FASTCALL, "See Request.wait."},
    {"settle", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(wait_for_message)), METH_FASTCALL, "See Request.settle."},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef properties[] = {
    {"source", source_of, nullptr, "The rank that sent the message; -1 until it has come, if any rank may.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy_message)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, nullptr},
};
PyType_Spec spec{"pycomm._native.ShmMessage", sizeof(MessageObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

constexpr int kNobody = -2;

// A rank of the group; -1 for None, where it may be any; kNobody for anything else.
int read_peer(const Group& group, PyObject* object, bool may_be_any) {
  if (object == Py_None && may_be_any) return -1;
  if (!PyLong_CheckExact(object)) return kNobody;
  int overflow = 0;
  const long rank = PyLong_AsLongAndOverflow(object, &overflow);
  return overflow != 0 || rank < 0 || rank >= group.ranks() ? kNobody : static_cast<int>(rank);
}

bool read_tag(const Cut& cut, PyObject* object, std::int64_t& tag) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  tag = PyLong_AsLongAndOverflow(object, &overflow);
  return overflow == 0 && tag >= 0 && tag <= cut.last_tag;
}

// Null, and a Python error set, if it can't be made.
PyObject* make_object(std::shared_ptr<Group> group, std::shared_ptr<Message> message, PyObject* tensor) {
  PyObject* const self = message_type->tp_alloc(message_type, 0);
  if (self == nullptr) return nullptr;
  MessageObject& object = message_of(self);
  new (&object.group) std::shared_ptr<Group>(std::move(group));
  new (&object.message) std::shared_ptr<Message>(std::move(message));
  object.tensor = Py_NewRef(tensor);
  return self;
}

std::shared_ptr<Message> start(Group& group, bool is_send, void* data, std::size_t bytes, int peer, std::int64_t tag) {
  const LazyGilRelease release(bytes >= kUnlockedBytes);
  return is_send ? group.mailbox().send(data, bytes, peer, tag) : group.mailbox().receive(data, bytes, peer, tag);
}

// isend(tensor, peer, tag) and irecv.
PyObject* start_fast(bool is_send, PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat flat;
  std::int64_t tag = 0;
  const int peer = count == 3 ? read_peer(*cut.group, args[1], /*may_be_any=*/!is_send) : kNobody;
  if (peer == kNobody || !read_tag(cut, args[2], tag) || !cut.tensors.read(args[0], flat)) Py_RETURN_FALSE;
  return start_message(cut.group, is_send, flat.data, flat.bytes(), peer, tag, args[0]);
}

// send(tensor, dst, None, tag) and recv, with the arguments of pycomm.send: the last two may be left out, and of recv the second.
PyObject* move_fast(bool is_send, PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat flat;
  std::int64_t tag = 0;
  if (count < 1 || count > 4 || (count > 2 && args[2] != Py_None) || (count > 3 && !read_tag(cut, args[3], tag))) Py_RETURN_FALSE;
  const int peer = read_peer(*cut.group, count > 1 ? args[1] : Py_None, /*may_be_any=*/!is_send);
  if (peer == kNobody || !cut.tensors.read(args[0], flat)) Py_RETURN_FALSE;
  std::shared_ptr<Message> message;
  try {
    message = start(*cut.group, is_send, flat.data, flat.bytes(), peer, tag);
    const LazyGilRelease release(flat.bytes() >= kUnlockedBytes);
    cut.group->mailbox().wait(message, cut.group->timeout_ns());
  } catch (const PythonError&) {
    // A signal handler raised, and the message is still under way.
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject* const kept = make_object(cut.group, std::move(message), args[0]);
    if (kept == nullptr || PyList_Append(cut.interrupted.ptr(), kept) != 0) Py_INCREF(args[0]);
    Py_XDECREF(kept);
    PyErr_Restore(type, value, traceback);
    return nullptr;
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  if (is_send) Py_RETURN_TRUE;
  return PyLong_FromLong(message->peer);
}

}  // namespace

PyObject* start_message(std::shared_ptr<Group> group, bool is_send, void* data, std::size_t bytes, int peer, std::int64_t tag,
                        PyObject* tensor) {
  try {
    auto message = start(*group, is_send, data, bytes, peer, tag);
    return make_object(std::move(group), std::move(message), tensor);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyObject* fast_send(PyObject* self, PyObject* const* args, Py_ssize_t count) { return move_fast(true, self, args, count); }
PyObject* fast_recv(PyObject* self, PyObject* const* args, Py_ssize_t count) { return move_fast(false, self, args, count); }
PyObject* fast_isend(PyObject* self, PyObject* const* args, Py_ssize_t count) { return start_fast(true, self, args, count); }
PyObject* fast_irecv(PyObject* self, PyObject* const* args, Py_ssize_t count) { return start_fast(false, self, args, count); }

void bind_messages(pybind11::module_& m) {
  message_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (message_type == nullptr) throw pybind11::error_already_set();
  m.add_object("ShmMessage", pybind11::reinterpret_borrow<pybind11::object>(reinterpret_cast<PyObject*>(message_type)));
}

}  // namespace pycomm
