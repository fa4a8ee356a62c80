#include "shm_messages.h"

#include <memory>
#include <utility>
#include <vector>

#include "../shm/mailbox.h"
#include "batch_kinds.h"
#include "gil.h"
#include "handle.h"
#include "shm_errors.h"

namespace pycomm {
namespace {

using shm::Group;
using shm::Message;

constexpr int kNobody = -2;

// A rank of the group; -1 for None, where it may be any; kNobody for anything else.
int read_peer(const Group& group, PyObject* object, bool may_be_any) {
  if (object == Py_None && may_be_any) return -1;
  if (!PyLong_CheckExact(object)) return kNobody;
  int overflow = 0;
  const long rank = PyLong_AsLongAndOverflow(object, &overflow);
  return overflow != 0 || rank < 0 || rank >= group.ranks() ? kNobody : static_cast<int>(rank);
}

bool read_tag(PyObject* object, std::int64_t& tag) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  tag = PyLong_AsLongAndOverflow(object, &overflow);
  return overflow == 0 && tag >= 0 && tag <= shm::kLastTag;
}

std::shared_ptr<Message> start(Group& group, bool is_send, void* data, std::size_t bytes, int peer, std::int64_t tag) {
  const LazyGilRelease release(bytes >= kUnlockedBytes);
  return is_send ? group.mailbox().send(data, bytes, peer, tag) : group.mailbox().receive(data, bytes, peer, tag);
}

// Null, and a Python error set, if it can't be started.
PyObject* start_handle(PyTypeObject* type, std::shared_ptr<Group> group, bool is_send, void* data, std::size_t bytes, int peer, std::int64_t tag,
                       PyObject* tensor, PyObject* owner) {
  try {
    auto message = start(*group, is_send, data, bytes, peer, tag);
    PyObject* const handle = make_handle(type, group, message, tensor, owner);
    if (handle == nullptr && !group->mailbox().give_up(message)) Py_INCREF(tensor);
    return handle;
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

// What a message is made of.
struct Arguments {
  Flat flat;
  int peer = kNobody;
  std::int64_t tag = 0;

  // (tensor, dst, None, tag), the arguments of pycomm.send: the last two may be left out, and of a receive the second.
  bool read(const Cut& cut, bool is_send, PyObject* const* args, Py_ssize_t count) {
    if (count < 1 || count > 4 || (count > 2 && args[2] != Py_None) || (count > 3 && !read_tag(args[3], tag))) return false;
    peer = read_peer(*cut.group, count > 1 ? args[1] : Py_None, /*may_be_any=*/!is_send);
    return peer != kNobody && cut.tensors.read(args[0], flat);
  }
};

// isend and irecv: those arguments, the class of the handle, and pycomm's Group.
PyObject* start_fast(bool is_send, PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Arguments of;
  if (count < 3 || !is_handle_type(args[count - 2]) || !of.read(cut, is_send, args, count - 2)) Py_RETURN_FALSE;
  auto* const type = reinterpret_cast<PyTypeObject*>(args[count - 2]);
  return start_handle(type, cut.group, is_send, of.flat.data, of.flat.bytes(), of.peer, of.tag, args[0], args[count - 1]);
}

// One of a batch, read from its P2POp; the tensor is held, as that may be given another one meanwhile.
struct Batched {
  bool is_send;
  Arguments of;
  pybind11::object tensor, handle;

  // `ranks` are those of `group`, null where they are the global ones.
  bool read(const Cut& cut, const BatchKinds& kinds, PyObject* message, PyObject* group, PyObject* ranks) {
    const auto field = [&](BatchKinds::Field which) { return kinds.field(message, which); };
    if (Py_TYPE(message) != kinds.message) return false;
    for (int i = 0; i < BatchKinds::kFields; ++i)
      if (field(static_cast<BatchKinds::Field>(i)) == nullptr) return false;
    is_send = field(BatchKinds::kOp) == kinds.isend;
    if (!is_send && field(BatchKinds::kOp) != kinds.irecv) return false;
    if (field(BatchKinds::kGroup) != group && (field(BatchKinds::kGroup) != Py_None || ranks != nullptr)) return false;
    const bool is_global = field(BatchKinds::kPeer) != Py_None;
    if (is_global && field(BatchKinds::kGroupPeer) != Py_None) return false;
    of.peer = is_global && ranks != nullptr ? index_of(field(BatchKinds::kPeer), ranks)
                                            : read_peer(*cut.group, field(is_global ? BatchKinds::kPeer : BatchKinds::kGroupPeer), /*may_be_any=*/false);
    tensor = pybind11::reinterpret_borrow<pybind11::object>(field(BatchKinds::kTensor));
    return of.peer != kNobody && read_tag(field(BatchKinds::kTag), of.tag) && cut.tensors.read(tensor.ptr(), of.flat);
  }

  static int index_of(PyObject* rank, PyObject* ranks) {
    if (!PyLong_CheckExact(rank)) return kNobody;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ranks); ++i)
      if (PyObject_RichCompareBool(rank, PyTuple_GET_ITEM(ranks, i), Py_EQ) == 1) return static_cast<int>(i);
    return kNobody;
  }
};

// A call gives its message up, with the Python error that is set. A send that has begun is kept, with its tensor, until it is done; those kept
// before go, as far as they are done.
void leave(const Cut& cut, std::shared_ptr<Message> message, PyObject* tensor) {
  if (cut.group->mailbox().give_up(message)) return;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  for (Py_ssize_t i = PyList_GET_SIZE(cut.left.ptr()); i-- > 0;)
    if (has_ended(PyList_GET_ITEM(cut.left.ptr(), i))) PyList_SetSlice(cut.left.ptr(), i, i + 1, nullptr);
  PyObject* const kept = make_handle(nullptr, cut.group, std::move(message), tensor, nullptr);
  if (kept == nullptr || PyList_Append(cut.left.ptr(), kept) != 0) Py_INCREF(tensor);
  Py_XDECREF(kept);
  PyErr_Restore(type, value, traceback);
}

// send and recv.
PyObject* move_fast(bool is_send, PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Arguments of;
  if (!of.read(cut, is_send, args, count)) Py_RETURN_FALSE;
  std::shared_ptr<Message> message;
  try {
    message = start(*cut.group, is_send, of.flat.data, of.flat.bytes(), of.peer, of.tag);
    const LazyGilRelease release(of.flat.bytes() >= kUnlockedBytes);
    cut.group->mailbox().wait(message, cut.group->timeout_ns());
  } catch (const PythonError&) {  // a signal handler raised
    leave(cut, std::move(message), args[0]);
    return nullptr;
  } catch (const shm::Late&) {
    set_python_error();
    leave(cut, std::move(message), args[0]);
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
  return start_handle(nullptr, std::move(group), is_send, data, bytes, peer, tag, tensor, nullptr);
}

PyObject* fast_send(PyObject* self, PyObject* const* args, Py_ssize_t count) { return move_fast(true, self, args, count); }
PyObject* fast_recv(PyObject* self, PyObject* const* args, Py_ssize_t count) { return move_fast(false, self, args, count); }
PyObject* fast_isend(PyObject* self, PyObject* const* args, Py_ssize_t count) { return start_fast(true, self, args, count); }
PyObject* fast_irecv(PyObject* self, PyObject* const* args, Py_ssize_t count) { return start_fast(false, self, args, count); }

PyObject* fast_batch(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  if (count < 3 || count > 4 || !PyList_CheckExact(args[0]) || PyList_GET_SIZE(args[0]) == 0) Py_RETURN_FALSE;
  const BatchKinds* const kinds = BatchKinds::of(args[1]);
  PyObject* const ranks = count > 3 ? args[3] : nullptr;
  if (kinds == nullptr || (ranks != nullptr && !PyTuple_CheckExact(ranks))) Py_RETURN_FALSE;
  std::vector<Batched> batch(static_cast<std::size_t>(PyList_GET_SIZE(args[0])));
  for (std::size_t i = 0; i < batch.size(); ++i)
    if (!batch[i].read(cut, *kinds, PyList_GET_ITEM(args[0], static_cast<Py_ssize_t>(i)), args[2], ranks)) Py_RETURN_FALSE;
  for (const bool sends : {false, true}) {  // receives first, so that messages find their place waiting
    for (Batched& each : batch) {
      if (each.is_send != sends) continue;
      each.handle = pybind11::reinterpret_steal<pybind11::object>(start_handle(
          kinds->handle, cut.group, sends, each.of.flat.data, each.of.flat.bytes(), each.of.peer, each.of.tag, each.tensor.ptr(), args[2]));
      if (!each.handle) return nullptr;
    }
  }
  PyObject* const handles = PyList_New(static_cast<Py_ssize_t>(batch.size()));
  for (std::size_t i = 0; handles != nullptr && i < batch.size(); ++i) PyList_SET_ITEM(handles, static_cast<Py_ssize_t>(i), batch[i].handle.release().ptr());
  return handles;
}

}  // namespace pycomm
