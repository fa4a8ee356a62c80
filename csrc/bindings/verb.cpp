// pycomm._native.Verb: a Python function with a short cut in front of it.
//
// Reaching native code through a Python frame costs as much as a 4-byte all_reduce. So a hot verb is an object whose call
// goes straight to the group's short cut (`Group.fast_*`, a C function of the transport) with the caller's own arguments,
// those with keywords (`src=0`, `op=...`) at their places, and to the Python function if that answers False: with nothing
// done, because the call is not an ordinary one. A verb that returns handles passes what they are made of, their class or
// batch_kinds(), and the group on, behind the caller's arguments.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>

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
  Attribute short_cut;  // of a group
  int takes_group;      // whether the arguments mean the same in a group that is named
  PyObject* names;      // of the function's parameters that have a place,
  PyObject* defaults;   // and what the last of them are if they are left out
  PyObject* handle;     // what they are made of; null if the verb returns none
  PyObject* dict;       // __name__, __doc__, __wrapped__, ...
  PyObject* weakrefs;
};

PyObject* name_group = nullptr;
PyObject* name_world = nullptr;

constexpr Py_ssize_t kMost = 6;  // of more arguments no short cut knows what to make

// Arguments as a short cut takes them; the group, if one is named, is apart.
struct Placed {
  PyObject* args[kMost + 2] = {};  // two more: what handles are made of, and the group
  Py_ssize_t count = 0;
  PyObject* group = nullptr;

  // False where they have no such places: the function then serves, or says what is wrong. No Python error is set.
  bool read(const Verb* self, PyObject* const* given, Py_ssize_t given_count, PyObject* keywords) {
    if (given_count > kMost || given_count > PyTuple_GET_SIZE(self->names)) return false;
    count = given_count;
    std::copy(given, given + count, args);
    if (count > 0 && PyTuple_GET_ITEM(self->names, count - 1) == name_group) {  // the last one, by its place
      if (args[--count] != Py_None) group = args[count];
      args[count] = nullptr;
    }
    for (Py_ssize_t k = 0; keywords != nullptr && k < PyTuple_GET_SIZE(keywords); ++k) {
      PyObject* const value = given[given_count + k];
      const Py_ssize_t place = place_of(self, PyTuple_GET_ITEM(keywords, k));
      if (place < given_count || place >= kMost) return false;
      if (PyTuple_GET_ITEM(keywords, k) == name_group) {
        if (value != Py_None) group = value;
        continue;
      }
      args[place] = value;
      count = std::max(count, place + 1);
    }
    const Py_ssize_t first_default = PyTuple_GET_SIZE(self->names) - PyTuple_GET_SIZE(self->defaults);
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (args[i] != nullptr) continue;
      if (i < first_default) return false;
      args[i] = PyTuple_GET_ITEM(self->defaults, i - first_default);
    }
    return true;
  }

  // -1 if there is none. The names in a call are interned, as those of parameters are.
  static Py_ssize_t place_of(const Verb* self, PyObject* name) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->names); ++i)
      if (PyTuple_GET_ITEM(self->names, i) == name) return i;
    return -1;
  }
};

// What the short cut answers; False where there is none to take.
PyObject* take_short_cut(Verb* self, PyObject* const* given, Py_ssize_t given_count, PyObject* keywords) {
  Placed placed;
  if (!placed.read(self, given, given_count, keywords)) Py_RETURN_FALSE;
  PyObject* group = self->world.of(self->state);
  if (group == nullptr) return nullptr;
  if (placed.group != nullptr && placed.group != group) {
    Py_DECREF(group);
    if (!self->takes_group) Py_RETURN_FALSE;
    group = Py_NewRef(placed.group);
  }
  if (self->handle != nullptr) {
    placed.args[placed.count++] = self->handle;
    placed.args[placed.count++] = group;
  }
  PyObject* const short_cut = self->short_cut.of(group);
  if (short_cut == nullptr) PyErr_Clear();  // a torch ProcessGroup, for one
  PyObject* const answer =
      short_cut == nullptr ? Py_NewRef(Py_False) : PyObject_Vectorcall(short_cut, placed.args, static_cast<size_t>(placed.count), nullptr);
  Py_XDECREF(short_cut);
  Py_DECREF(group);
  return answer;
}

PyObject* call(PyObject* object, PyObject* const* args, size_t flagged_count, PyObject* keywords) {
  auto* const self = reinterpret_cast<Verb*>(object);
  PyObject* const answer = take_short_cut(self, args, PyVectorcall_NARGS(flagged_count), keywords);
  if (answer != Py_True && answer != Py_False) return answer;  // what the call results in, or null
  Py_DECREF(answer);
  if (answer == Py_True) Py_RETURN_NONE;
  return PyObject_Vectorcall(self->function, args, flagged_count, keywords);
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *function, *state, *short_cut, *names, *defaults, *handle;
  int takes_group;
  if (!PyArg_ParseTuple(args, "OOUpO!O!O:Verb", &function, &state, &short_cut, &takes_group, &PyTuple_Type, &names, &PyTuple_Type, &defaults, &handle))
    return nullptr;
  auto* const self = reinterpret_cast<Verb*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = call;
  self->function = Py_NewRef(function);
  self->state = Py_NewRef(state);
  new (&self->world) Attribute(name_world);
  new (&self->short_cut) Attribute(short_cut);
  self->takes_group = takes_group;
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
  name_group = PyUnicode_InternFromString("group");
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  m.add_object("Verb", py::reinterpret_steal<py::object>(type));
}

}  // namespace pycomm
