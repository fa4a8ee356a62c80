// pycomm._native.Verb: a Python function with a short cut in front of it.
//
// Reaching native code through a Python frame costs as much as a 4-byte all_reduce. So a hot verb is an object whose call
// goes straight to the group's short cut (`Group.fast_*`, a C function of the transport) with the caller's own arguments,
// those with keywords (`src=0`, `op=...`) at their places, and to the Python function if that answers False: with nothing
// done, because the call is not an ordinary one. The caller names a root or a peer by its global rank, the short cut by its
// rank in the group. A call with async_op=True has a short cut of its own (`Group.start_*`). Who returns handles is passed what
// they are made of, their class or batch_kinds(), and the group, behind the caller's arguments.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>

#include "gil.h"
#include "slots.h"

namespace py = pybind11;

namespace pycomm {
namespace {

struct Verb {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* function;   // the ordinary path
  PyObject* state;      // has the default group as
  Attribute world;      // this one
  Attribute short_cut;  // of a group,
  Attribute start;      // which another one starts, where it can be told to by async_op,
  Attribute ranks;      // whose members' global ranks are these
  Py_ssize_t rank_place;  // of the argument that is a global rank; -1 if there is none
  Py_ssize_t group_place;  // of the argument that names the group; else the number of parameters
  Py_ssize_t async_place;  // of async_op; -1 if there is none
  PyObject* names;      // of the function's parameters that have a place,
  PyObject* defaults;   // and what the last of them are if they are left out
  PyObject* handle;     // what handles are made of; null if the verb returns none
  PyObject* dict;       // __name__, __doc__, __wrapped__, ...
  PyObject* weakrefs;

  bool gives_handles() const { return handle != nullptr && async_place < 0; }  // of every call
};

PyObject* name_async_op = nullptr;
PyObject* name_group = nullptr;
PyObject* name_ranks = nullptr;
PyObject* name_world = nullptr;

constexpr Py_ssize_t kMost = 6;  // of more arguments no short cut knows what to make

// Arguments as a short cut takes them; the group, if one is named, is apart.
struct Placed {
  PyObject* args[kMost + 2] = {};  // two more: what handles are made of, and the group
  Py_ssize_t count = 0;
  PyObject* group = nullptr;
  bool is_started = false;   // and not waited for
  PyObject* rank = nullptr;  // in the group, where a global one was given

  Placed() = default;
  ~Placed() { Py_XDECREF(rank); }
  Placed(const Placed&) = delete;
  Placed& operator=(const Placed&) = delete;

  // False where they have no such places: the function then serves, or says what is wrong. No Python error is set.
  bool read(const Verb* self, PyObject* const* given, Py_ssize_t given_count, PyObject* keywords) {
    if (given_count > kMost || given_count > PyTuple_GET_SIZE(self->names)) return false;
    for (Py_ssize_t place = 0; place < given_count; ++place)
      if (!put(self, place, given[place])) return false;
    for (Py_ssize_t k = 0; keywords != nullptr && k < PyTuple_GET_SIZE(keywords); ++k) {
      const Py_ssize_t place = place_of(self->names, PyTuple_GET_ITEM(keywords, k));
      if (place < given_count || place >= kMost || !put(self, place, given[given_count + k])) return false;
    }
    const Py_ssize_t first_default = PyTuple_GET_SIZE(self->names) - PyTuple_GET_SIZE(self->defaults);
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (args[i] != nullptr) continue;
      if (i < first_default) return false;
      args[i] = PyTuple_GET_ITEM(self->defaults, i - first_default);
    }
    return true;
  }

  bool put(const Verb* self, Py_ssize_t place, PyObject* value) {
    if (place == self->group_place) {
      if (value != Py_None) group = value;
    } else if (place == self->async_place) {
      is_started = value == Py_True;
      return is_started || value == Py_False;
    } else {
      args[place] = value;
      count = std::max(count, place + 1);
    }
    return true;
  }

  // Puts the rank in a group of `ranks` in the place of the global one. False if it is none of them, or left out.
  bool translate(Py_ssize_t place, PyObject* ranks) {
    if (place < 0) return true;
    if (place >= count || !PyLong_CheckExact(args[place])) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ranks); ++i) {
      if (PyObject_RichCompareBool(args[place], PyTuple_GET_ITEM(ranks, i), Py_EQ) != 1) continue;
      args[place] = rank = PyLong_FromSsize_t(i);
      return rank != nullptr;
    }
    return false;
  }

  // -1 if there is none. The names in a call are interned, as those of parameters are.
  static Py_ssize_t place_of(PyObject* names, PyObject* name) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i)
      if (PyTuple_GET_ITEM(names, i) == name) return i;
    return -1;
  }
};

// A new reference to that short cut of a group; null if it has none, and no Python error set.
PyObject* cut_of(Attribute& which, PyObject* group) {
  PyObject* const short_cut = which.of(group);
  if (short_cut == nullptr) PyErr_Clear();  // a torch ProcessGroup, for one
  return short_cut;
}

// What the short cut of the default group answers to arguments that it takes as they are; False where it can't be taken.
PyObject* take_default(Verb* self, PyObject* const* args, Py_ssize_t count) {
  PyObject* const world = self->world.of(self->state);
  PyObject* const short_cut = cut_of(self->short_cut, world);
  PyObject* const answer = short_cut == nullptr ? Py_NewRef(Py_False) : PyObject_Vectorcall(short_cut, args, static_cast<size_t>(count), nullptr);
  Py_XDECREF(short_cut);
  Py_DECREF(world);  // held until here: the main thread may end Python meanwhile, and this one with it
  return answer;
}

// The same of any arguments; apart, as its frame would cost the plain call 10 ns.
[[gnu::noinline]] PyObject* take_short_cut(Verb* self, PyObject* const* given, Py_ssize_t given_count, PyObject* keywords) {
  Placed placed;
  if (!placed.read(self, given, given_count, keywords)) Py_RETURN_FALSE;
  if (placed.is_started && self->handle == nullptr) Py_RETURN_FALSE;  // nothing starts this verb
  auto group = py::reinterpret_steal<py::object>(self->world.of(self->state));
  const bool is_other = placed.group != nullptr && placed.group != group.ptr();
  if (is_other) group = py::reinterpret_borrow<py::object>(placed.group);
  const auto short_cut = py::reinterpret_steal<py::object>(cut_of(placed.is_started ? self->start : self->short_cut, group.ptr()));
  if (!short_cut) Py_RETURN_FALSE;
  const auto ranks = py::reinterpret_steal<py::object>(is_other ? self->ranks.of(group.ptr()) : nullptr);
  if (is_other && (!PyTuple_CheckExact(ranks.ptr()) || !placed.translate(self->rank_place, ranks.ptr()))) Py_RETURN_FALSE;
  if (placed.is_started || self->gives_handles()) {
    placed.args[placed.count++] = self->handle;
    placed.args[placed.count++] = group.ptr();
  }
  // A short cut that is Python's may be where a thread is ended as the interpreter ends: nothing here may be given back by that.
  PyObject* const answer =
      or_wait_for_the_end([&] { return PyObject_Vectorcall(short_cut.ptr(), placed.args, static_cast<size_t>(placed.count), nullptr); });
  if (!is_other || answer == nullptr || !PyLong_CheckExact(answer)) return answer;
  const Py_ssize_t rank = PyLong_AsSsize_t(answer);  // who sent what was received
  Py_DECREF(answer);
  return Py_NewRef(PyTuple_GET_ITEM(ranks.ptr(), rank));
}

PyObject* call(PyObject* object, PyObject* const* args, size_t flagged_count, PyObject* keywords) {
  auto* const self = reinterpret_cast<Verb*>(object);
  const Py_ssize_t count = PyVectorcall_NARGS(flagged_count);
  const bool is_plain = keywords == nullptr && !self->gives_handles() && count <= self->group_place;
  PyObject* const answer = is_plain ? take_default(self, args, count) : take_short_cut(self, args, count, keywords);
  if (answer != Py_True && answer != Py_False) return answer;  // what the call results in, or null
  Py_DECREF(answer);
  if (answer == Py_True) Py_RETURN_NONE;
  return PyObject_Vectorcall(self->function, args, flagged_count, keywords);
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *function, *state, *short_cut, *names, *defaults, *handle, *start;
  Py_ssize_t rank_place;
  if (!PyArg_ParseTuple(args, "OOUnO!O!OO:Verb", &function, &state, &short_cut, &rank_place, &PyTuple_Type, &names, &PyTuple_Type, &defaults, &handle,
                        &start))
    return nullptr;
  auto* const self = reinterpret_cast<Verb*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = call;
  self->function = Py_NewRef(function);
  self->state = Py_NewRef(state);
  new (&self->world) Attribute(name_world);
  new (&self->short_cut) Attribute(short_cut);
  new (&self->start) Attribute(start == Py_None ? short_cut : start);  // then there is no handle either
  new (&self->ranks) Attribute(name_ranks);
  self->rank_place = rank_place;
  const Py_ssize_t group_place = Placed::place_of(names, name_group);
  self->group_place = group_place < 0 ? PyTuple_GET_SIZE(names) : group_place;
  self->async_place = Placed::place_of(names, name_async_op);
  self->names = Py_NewRef(names);
  self->defaults = Py_NewRef(defaults);
  if (handle != Py_None) self->handle = Py_NewRef(handle);
  self->dict = PyDict_New();
  return reinterpret_cast<PyObject*>(self);
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  auto* const self = reinterpret_cast<Verb*>(object);
  Py_VISIT(self->function);
  Py_VISIT(self->state);
  Py_VISIT(self->defaults);
  Py_VISIT(self->handle);
  Py_VISIT(self->dict);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

int clear(PyObject* object) {
  auto* const self = reinterpret_cast<Verb*>(object);
  Py_CLEAR(self->function);
  Py_CLEAR(self->state);
  Py_CLEAR(self->names);
  Py_CLEAR(self->defaults);
  Py_CLEAR(self->handle);
  Py_CLEAR(self->dict);
  return 0;
}

void destroy(PyObject* object) {
  auto* const self = reinterpret_cast<Verb*>(object);
  PyTypeObject* const type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  if (self->weakrefs != nullptr) PyObject_ClearWeakRefs(object);
  clear(object);
  std::destroy_at(&self->world);
  std::destroy_at(&self->short_cut);
  std::destroy_at(&self->start);
  std::destroy_at(&self->ranks);
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* represent(PyObject* object) { return PyObject_Repr(reinterpret_cast<Verb*>(object)->function); }

// Pickles as functions do: by name.
PyObject* reduce(PyObject* object, PyObject*) { return PyObject_GetAttrString(object, "__qualname__"); }

PyMethodDef methods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Verb, vectorcall), READONLY, nullptr},
    {"__dictoffset__", T_PYSSIZET, offsetof(Verb, dict), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Verb, weakrefs), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyGetSetDef properties[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_repr, reinterpret_cast<void*>(represent)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {0, nullptr},
};
PyType_Spec spec{"pycomm._native.Verb", sizeof(Verb), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

void bind_verb(py::module_& m);  // module.cpp

void bind_verb(py::module_& m) {
  name_world = PyUnicode_InternFromString("world");
  name_async_op = PyUnicode_InternFromString("async_op");
  name_group = PyUnicode_InternFromString("group");
  name_ranks = PyUnicode_InternFromString("_ranks");
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  m.add_object("Verb", py::reinterpret_steal<py::object>(type));
}

}  // namespace pycomm
