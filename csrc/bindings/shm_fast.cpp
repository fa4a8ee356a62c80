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
class List {
 public:
  // Of one tensor a rank, each like `first`.
  bool read(const Cut& cut, PyObject* object, const Flat& first) {
    if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return false;
    tensors_ = pybind11::reinterpret_steal<pybind11::object>(PySequence_Tuple(object));
    if (!tensors_) PyErr_Clear();
    const auto ranks = static_cast<std::size_t>(cut.group->ranks());
    if (!tensors_ || static_cast<std::size_t>(PyTuple_GET_SIZE(tensors_.ptr())) != ranks) return false;
    flats_.resize(ranks);
    data_.resize(ranks);
    for (std::size_t r = 0; r < ranks; ++r) {
      Flat& flat = flats_[r];
      if (!cut.tensors.read(PyTuple_GET_ITEM(tensors_.ptr(), static_cast<Py_ssize_t>(r)), flat) || flat.dtype != first.dtype || flat.numel != first.numel)
        return false;
      data_[r] = flat.data;
    }
    return true;
  }
  bool are_apart() const {
    for (std::size_t r = 0; r < flats_.size(); ++r)
      for (std::size_t before = 0; before < r; ++before)
        if (do_overlap(flats_[r], flats_[before])) return false;
    return true;
  }
  // None of the tensors is in `flat`, but that of rank `rank`, which may be all of it.
  bool are_apart_from(const Flat& flat, int rank = -1) const {
    for (std::size_t r = 0; r < flats_.size(); ++r)
      if (do_overlap(flats_[r], flat) && (static_cast<int>(r) != rank || flats_[r].data != flat.data)) return false;
    return true;
  }
  bool are_apart_from(const List& other) const {
    for (const Flat& flat : other.flats_)
      if (!are_apart_from(flat)) return false;
    return true;
  }
  void* const* data() const { return data_.data(); }

 private:
  std::vector<Flat> flats_;
  std::vector<void*> data_;
  pybind11::object tensors_;
};

// gather and scatter: a tensor, on the root a list, and the root, rank 0 if none is named. `move(group, own, blocks, call)` runs it.
template <class Move>
PyObject* run_rooted(Verb verb, PyObject* self, PyObject* const* args, Py_ssize_t count, Move move) {
  const Cut& cut = cut_of(self);
  Flat own;
  Call call{verb};
  List list;
  if (count < 1 || count > 3 || !cut.tensors.read(args[0], own)) Py_RETURN_FALSE;
  if (count > 2 && !read_root(cut, args[2], call.root)) Py_RETURN_FALSE;
  PyObject* const given = count > 1 ? args[1] : Py_None;
  const bool is_root = cut.group->rank() == call.root;
  if (is_root ? !list.read(cut, given, own) || !list.are_apart_from(own, call.root) : given != Py_None) Py_RETURN_FALSE;
  if (verb == Verb::kGather && !list.are_apart()) Py_RETURN_FALSE;
  call.dtype = own.dtype;
  call.numel = own.numel;
  return run(static_cast<std::size_t>(cut.group->ranks()) * own.bytes(), [&] { move(*cut.group, own.data, list.data(), call); });
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
  return run(output.bytes(), [&] { cut.group->all_gather({output.data, input.bytes()}, input.data, call); });
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
  return run(input.bytes(), [&] { cut.group->reduce_scatter(output.data, {input.data, output.bytes()}, call); });
}

// -- of lists

PyObject* all_gather_list(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat own;
  List list;
  if (count != 2 || !cut.tensors.read(args[1], own) || !list.read(cut, args[0], own)) Py_RETURN_FALSE;
  if (!list.are_apart_from(own, cut.group->rank()) || !list.are_apart()) Py_RETURN_FALSE;
  Call call{Verb::kAllGather};
  call.dtype = own.dtype;
  call.numel = own.numel;
  return run(static_cast<std::size_t>(cut.group->ranks()) * own.bytes(), [&] { cut.group->all_gather(shm::Blocks(list.data()), own.data, call); });
}

PyObject* reduce_scatter_list(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat own;
  List list;
  Call call{Verb::kReduceScatter};
  if (count < 2 || count > 3 || !cut.tensors.read(args[0], own) || !list.read(cut, args[1], own)) Py_RETURN_FALSE;
  if (!read_op(count > 2 ? args[2] : nullptr, own.dtype, call.op) || !list.are_apart_from(own, cut.group->rank())) Py_RETURN_FALSE;
  call.dtype = own.dtype;
  call.numel = own.numel;
  return run(static_cast<std::size_t>(cut.group->ranks()) * own.bytes(), [&] { cut.group->reduce_scatter(own.data, shm::Blocks(list.data()), call); });
}

PyObject* all_to_all_list(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat first;
  List outputs, inputs;
  if (count != 2 || !PyList_CheckExact(args[1]) || PyList_GET_SIZE(args[1]) == 0 || !cut.tensors.read(PyList_GET_ITEM(args[1], 0), first)) Py_RETURN_FALSE;
  if (!outputs.read(cut, args[0], first) || !inputs.read(cut, args[1], first)) Py_RETURN_FALSE;
  if (!outputs.are_apart() || !outputs.are_apart_from(inputs)) Py_RETURN_FALSE;
  const auto ranks = static_cast<std::size_t>(cut.group->ranks());
  const std::vector<std::size_t> splits(ranks, first.numel);
  if (Group::may_be_read(first.bytes()) && !shm::lie_as_one(inputs.data(), splits.data(), ranks, item_bytes(first.dtype))) Py_RETURN_FALSE;
  Call call{Verb::kAllToAll};
  call.dtype = first.dtype;
  return run(ranks * first.bytes(), [&] { cut.group->all_to_all(outputs.data(), inputs.data(), splits.data(), splits.data(), call); });
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
  add(definition<all_gather_list>("all_gather"));
  add(definition<reduce_scatter_list>("reduce_scatter"));
  add(definition<all_to_all_list>("all_to_all"));
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
