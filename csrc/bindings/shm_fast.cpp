// The short cuts of the shared-memory transport: `fast(tensor, op)` and its kin, plain C functions over the user's own tensor.
//
// Each answers True if the call is done, or what it results in, and False, with nothing touched, if the arguments are not as plain as this
// path wants them (a torch CPU tensor, contiguous, of a type and operator that we have). The ordinary path then does it,
// or words the error.
#include "shm_fast.h"

#include <vector>

#include "plain_tensor.h"
#include "shm_errors.h"
#include "shm_messages.h"

namespace pycomm {
namespace {

using shm::Call;
using shm::Group;
using shm::Verb;

template <class Run>
PyObject* run(std::size_t bytes, Run run_collective) {
  try {
    const LazyGilRelease release(bytes >= kUnlockedBytes);
    run_collective();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  Py_RETURN_TRUE;
}

PyObject* all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat flat;
  Call call{Verb::kAllReduce};
  if (count < 1 || count > 2 || !cut.tensors.read(args[0], flat) || !read_op(count > 1 ? args[1] : nullptr, flat.dtype, call.op)) Py_RETURN_FALSE;
  call.dtype = flat.dtype;
  call.numel = flat.numel;
  return run(flat.bytes(), [&] { cut.group->all_reduce(flat.data, flat.data, call); });
}

bool read_root(const Cut& cut, PyObject* object, int& root) {
  if (!PyLong_Check(object)) return false;
  const long rank = PyLong_AsLong(object);
  if (rank < 0 || rank >= cut.group->ranks()) {
    PyErr_Clear();
    return false;
  }
  root = static_cast<int>(rank);
  return true;
}

PyObject* broadcast(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat flat;
  Call call{Verb::kBroadcast};
  if (count != 2 || !read_root(cut, args[1], call.root) || !cut.tensors.read(args[0], flat)) Py_RETURN_FALSE;
  call.dtype = flat.dtype;
  call.numel = flat.numel;
  return run(flat.bytes(), [&] { cut.group->broadcast(flat.data, call); });
}

PyObject* reduce(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat flat;
  Call call{Verb::kReduce};
  if (count < 2 || count > 3 || !read_root(cut, args[1], call.root) || !cut.tensors.read(args[0], flat)) Py_RETURN_FALSE;
  if (!read_op(count > 2 ? args[2] : nullptr, flat.dtype, call.op)) Py_RETURN_FALSE;
  call.dtype = flat.dtype;
  call.numel = flat.numel;
  return run(flat.bytes(), [&] { cut.group->reduce(flat.data, flat.data, call); });
}

bool do_overlap(const Flat& a, const Flat& b) {
  const auto* a_start = static_cast<unsigned char*>(a.data);
  const auto* b_start = static_cast<unsigned char*>(b.data);
  return a_start < b_start + b.bytes() && b_start < a_start + a.bytes();
}

// The memory of a list's tensors, which live as long as this does: another thread may change the list meanwhile.
struct Blocks {
  std::vector<void*> data;
  pybind11::object tensors;
};

// A list of one tensor a rank, each like `own` and apart from it, but for this rank's, which may be `own` itself; with
// `are_apart` from each other, too.
bool read_list(const Cut& cut, PyObject* object, const Flat& own, bool are_apart, Blocks& blocks) {
  if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return false;
  const int ranks = cut.group->ranks();
  blocks.tensors = pybind11::reinterpret_steal<pybind11::object>(PySequence_Tuple(object));
  if (!blocks.tensors) PyErr_Clear();
  if (!blocks.tensors || PyTuple_GET_SIZE(blocks.tensors.ptr()) != ranks) return false;
  std::vector<Flat> flats(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    Flat& flat = flats[static_cast<std::size_t>(r)];
    if (!cut.tensors.read(PyTuple_GET_ITEM(blocks.tensors.ptr(), r), flat) || flat.dtype != own.dtype || flat.numel != own.numel) return false;
    if (do_overlap(flat, own) && (r != cut.group->rank() || flat.data != own.data)) return false;
    for (int other = 0; are_apart && other < r; ++other)
      if (do_overlap(flat, flats[static_cast<std::size_t>(other)])) return false;
    blocks.data.push_back(flat.data);
  }
  return true;
}

// gather and scatter: a tensor, on the root a list, and the root, rank 0 if none is named. `move(group, own, blocks, call)` runs it.
template <class Move>
PyObject* run_rooted(Verb verb, PyObject* self, PyObject* const* args, Py_ssize_t count, Move move) {
  const Cut& cut = cut_of(self);
  Flat own;
  Call call{verb};
  Blocks blocks;
  if (count < 1 || count > 3 || !cut.tensors.read(args[0], own)) Py_RETURN_FALSE;
  if (count > 2 && !read_root(cut, args[2], call.root)) Py_RETURN_FALSE;
  PyObject* const list = count > 1 ? args[1] : Py_None;
  const bool is_root = cut.group->rank() == call.root;
  if (is_root ? !read_list(cut, list, own, /*are_apart=*/verb == Verb::kGather, blocks) : list != Py_None) Py_RETURN_FALSE;
  call.dtype = own.dtype;
  call.numel = own.numel;
  return run(static_cast<std::size_t>(cut.group->ranks()) * own.bytes(), [&] { move(*cut.group, own.data, blocks.data.data(), call); });
}

PyObject* gather(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return run_rooted(Verb::kGather, self, args, count,
                    [](Group& group, void* own, void* const* blocks, const Call& call) { group.gather(blocks, own, call); });
}

PyObject* scatter(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return run_rooted(Verb::kScatter, self, args, count,
                    [](Group& group, void* own, void* const* blocks, const Call& call) { group.scatter(own, blocks, call); });
}

// Without split sizes: equal slices of the first dimensions.
PyObject* all_to_all(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat output, input;
  if (count != 2 || !cut.tensors.read(args[0], output) || !cut.tensors.read(args[1], input)) Py_RETURN_FALSE;
  const auto ranks = static_cast<std::size_t>(cut.group->ranks());
  if (output.dtype != input.dtype || output.numel != input.numel || do_overlap(output, input)) Py_RETURN_FALSE;
  for (const Flat& flat : {output, input})
    if (flat.rows == 0 || flat.rows % ranks != 0) Py_RETURN_FALSE;
  const std::vector<std::size_t> splits(ranks, input.numel / ranks);
  Call call{Verb::kAllToAll};
  call.dtype = input.dtype;
  return run(input.bytes(), [&] { cut.group->all_to_all(output.data, input.data, splits.data(), splits.data(), call); });
}

PyObject* all_gather(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat output, input;
  if (count != 2 || !cut.tensors.read(args[0], output) || !cut.tensors.read(args[1], input)) Py_RETURN_FALSE;
  const auto ranks = static_cast<std::size_t>(cut.group->ranks());
  if (output.dtype != input.dtype || output.numel != ranks * input.numel || do_overlap(output, input)) Py_RETURN_FALSE;
  Call call{Verb::kAllGather};
  call.dtype = input.dtype;
  call.numel = input.numel;
  return run(output.bytes(), [&] { cut.group->all_gather(output.data, input.data, call); });
}

PyObject* reduce_scatter(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat output, input;
  Call call{Verb::kReduceScatter};
  if (count < 2 || count > 3 || !cut.tensors.read(args[0], output) || !cut.tensors.read(args[1], input)) Py_RETURN_FALSE;
  if (!read_op(count > 2 ? args[2] : nullptr, input.dtype, call.op)) Py_RETURN_FALSE;
  const auto ranks = static_cast<std::size_t>(cut.group->ranks());
  if (output.dtype != input.dtype || input.numel != ranks * output.numel || do_overlap(output, input)) Py_RETURN_FALSE;
  call.dtype = input.dtype;
  call.numel = output.numel;
  return run(input.bytes(), [&] { cut.group->reduce_scatter(output.data, input.data, call); });
}

PyObject* barrier(PyObject* self, PyObject* const*, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  if (count != 0) Py_RETURN_FALSE;
  return run(0, [&] { cut.group->barrier(0); });
}

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
PyMethodDef* definition(const char* name) {
  static PyMethodDef method{name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL,
                            "Does it and answers True, or what it results in; or False if the ordinary path must do it."};
  return &method;
}

void destroy(PyObject* capsule) {
  delete static_cast<Cut*>(PyCapsule_GetPointer(capsule, nullptr));
}

}  // namespace

pybind11::dict short_cuts(std::shared_ptr<Group> group, const pybind11::object& tensor, const pybind11::object& parameter) {
  pybind11::dict cuts;
  auto cut = std::make_unique<Cut>(Cut{std::move(group), PlainTensors(tensor, parameter), pybind11::list()});
  if (!cut->tensors.can_read()) return cuts;
  const auto self = pybind11::reinterpret_steal<pybind11::object>(PyCapsule_New(cut.release(), nullptr, destroy));
  const auto add = [&](PyMethodDef* method) {
    cuts[method->ml_name] = pybind11::reinterpret_steal<pybind11::object>(PyCFunction_New(method, self.ptr()));
  };
  add(definition<all_reduce>("all_reduce"));
  add(definition<broadcast>("broadcast"));
  add(definition<all_gather>("all_gather_single"));
  add(definition<reduce_scatter>("reduce_scatter_single"));
  add(definition<barrier>("barrier"));
  add(definition<reduce>("reduce"));
  add(definition<gather>("gather"));
  add(definition<scatter>("scatter"));
  add(definition<all_to_all>("all_to_all_single"));
  add(definition<fast_send>("send"));
  add(definition<fast_recv>("recv"));
  add(definition<fast_isend>("isend"));
  add(definition<fast_irecv>("irecv"));
  add(definition<fast_batch>("batch_isend_irecv"));
  return cuts;
}

void know_torch_operators(const pybind11::tuple& operators) {
  if (operators.size() != std::size(torch_operators)) throw pybind11::value_error("expected an operator for each of ours but PREMUL_SUM");
  for (std::size_t i = 0; i < operators.size(); ++i) torch_operators[i] = Py_NewRef(PyTuple_GET_ITEM(operators.ptr(), static_cast<Py_ssize_t>(i)));
}

}  // namespace pycomm
