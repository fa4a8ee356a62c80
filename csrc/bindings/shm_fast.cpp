// The short cuts of the shared-memory transport: `fast(tensor, op)` and its kin, plain C functions over the user's own tensor.
//
// Each answers True if the call is done, or what it results in (of one that starts a call its handle), and False, with nothing touched, if the arguments are not as plain as this
// path wants them (a torch CPU tensor, contiguous, of a type and operator that we have). The ordinary path then does it,
// or words the error.
#include "shm_fast.h"

#include <vector>

#include "gil.h"
#include "handle.h"
#include "plain_tensor.h"
#include "shm_errors.h"
#include "shm_messages.h"
#include "tensor_list.h"

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

// Makes a call, or starts it. Then two arguments stand behind the caller's: the class of the handle, and pycomm's Group.
template <bool starts>
class Maker {
 public:
  // Takes them off `count`.
  Maker(PyObject* const* args, Py_ssize_t& count) {
    if (!starts) return;
    count -= 2;
    if (count >= 0 && is_handle_type(args[count])) type_ = reinterpret_cast<PyTypeObject*>(args[count]), group_ = args[count + 1];
  }
  bool is_well() const { return !starts || type_ != nullptr; }

  // `make(group, call)` does it, by pointers into `result`, which the handle tells, and `input`, if that is another tensor; `bytes` at most.
  template <class Make>
  PyObject* operator()(const Cut& cut, const Call& call, std::size_t bytes, PyObject* result, PyObject* input, Make make) const {
    if constexpr (!starts) return run(bytes, [&] { make(*cut.group, call); });
    try {
      std::shared_ptr<shm::Started> started;
      {
        const LazyGilRelease release(bytes >= kUnlockedBytes);
        started = cut.group->start(call.verb, bytes, [group = cut.group.get(), own = call, make](shm::Step step) mutable {
          own.step = step;
          make(*group, own);
        });
      }
      if (started == nullptr) Py_RETURN_FALSE;
      return make_handle(type_, cut.group, std::move(started), result, group_, input);
    } catch (...) {
      set_python_error();
      return nullptr;
    }
  }

 private:
  PyTypeObject* type_ = nullptr;
  PyObject* group_ = nullptr;
};

template <bool starts>
PyObject* all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  const Maker<starts> make(args, count);
  Flat flat;
  Call call{Verb::kAllReduce};
  if (!make.is_well() || count < 1 || count > 2 || !cut.tensors.read(args[0], flat) || !read_op(count > 1 ? args[1] : nullptr, flat.dtype, call.op)) Py_RETURN_FALSE;
  call.dtype = flat.dtype;
  call.numel = flat.numel;
  return make(cut, call, flat.bytes(), args[0], nullptr, [data = flat.data](Group& group, const Call& its) { group.all_reduce(data, data, its); });
}

bool read_root(const Cut& cut, PyObject* object, int& root) { return read_rank(object, cut.group->ranks(), root); }

template <bool starts>
PyObject* broadcast(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  const Maker<starts> make(args, count);
  Flat flat;
  Call call{Verb::kBroadcast};
  if (!make.is_well() || count != 2 || !read_root(cut, args[1], call.root) || !cut.tensors.read(args[0], flat)) Py_RETURN_FALSE;
  call.dtype = flat.dtype;
  call.numel = flat.numel;
  return make(cut, call, flat.bytes(), args[0], nullptr, [data = flat.data](Group& group, const Call& its) { group.broadcast(data, its); });
}

template <bool starts>
PyObject* reduce(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  const Maker<starts> make(args, count);
  Flat flat;
  Call call{Verb::kReduce};
  if (!make.is_well() || count < 2 || count > 3 || !read_root(cut, args[1], call.root) || !cut.tensors.read(args[0], flat)) Py_RETURN_FALSE;
  if (!read_op(count > 2 ? args[2] : nullptr, flat.dtype, call.op)) Py_RETURN_FALSE;
  call.dtype = flat.dtype;
  call.numel = flat.numel;
  return make(cut, call, flat.bytes(), args[0], nullptr, [data = flat.data](Group& group, const Call& its) { group.reduce(data, data, its); });
}

bool read_whole_and_part(const Cut& cut, PyObject* whole_object, PyObject* part_object, Flat& whole, Flat& part) {
  return pycomm::read_whole_and_part(cut.tensors, whole_object, part_object, cut.group->rank(), cut.group->ranks(), whole, part);
}

// gather and scatter: a tensor, on the root a list, and the root, rank 0 if none is named. `move(group, own, blocks, call)` runs it.
template <class Move>
PyObject* run_rooted(Verb verb, PyObject* self, PyObject* const* args, Py_ssize_t count, Move move) {
  const Cut& cut = cut_of(self);
  Flat own;
  Call call{verb};
  TensorList list;
  if (count < 1 || count > 3 || !cut.tensors.read(args[0], own)) Py_RETURN_FALSE;
  if (count > 2 && !read_root(cut, args[2], call.root)) Py_RETURN_FALSE;
  PyObject* const given = count > 1 ? args[1] : Py_None;
  const bool is_root = cut.group->rank() == call.root;
  if (is_root ? !list.read(cut.tensors, cut.group->ranks(), given, own) || !list.are_apart_from(own, call.root) : given != Py_None) Py_RETURN_FALSE;
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

template <bool starts>
PyObject* all_gather(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  const Maker<starts> make(args, count);
  Flat output, input;
  if (!make.is_well() || count != 2 || !read_whole_and_part(cut, args[0], args[1], output, input)) Py_RETURN_FALSE;
  Call call{Verb::kAllGather};
  call.dtype = input.dtype;
  call.numel = input.numel;
  return make(cut, call, output.bytes(), args[0], args[1], [to = output.data, from = input.data, bytes = input.bytes()](Group& group, const Call& its) {
    group.all_gather({to, bytes}, from, its);
  });
}

template <bool starts>
PyObject* reduce_scatter(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  const Maker<starts> make(args, count);
  Flat output, input;
  Call call{Verb::kReduceScatter};
  if (!make.is_well() || count < 2 || count > 3 || !read_whole_and_part(cut, args[1], args[0], input, output)) Py_RETURN_FALSE;
  if (!read_op(count > 2 ? args[2] : nullptr, input.dtype, call.op)) Py_RETURN_FALSE;
  call.dtype = input.dtype;
  call.numel = output.numel;
  return make(cut, call, input.bytes(), args[0], args[1], [to = output.data, from = input.data, bytes = output.bytes()](Group& group, const Call& its) {
    group.reduce_scatter(to, {from, bytes}, its);
  });
}

// -- of lists

PyObject* all_gather_list(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat own;
  TensorList list;
  if (count != 2 || !cut.tensors.read(args[1], own) || !list.read(cut.tensors, cut.group->ranks(), args[0], own)) Py_RETURN_FALSE;
  if (!list.are_apart_from(own, cut.group->rank()) || !list.are_apart()) Py_RETURN_FALSE;
  Call call{Verb::kAllGather};
  call.dtype = own.dtype;
  call.numel = own.numel;
  return run(static_cast<std::size_t>(cut.group->ranks()) * own.bytes(), [&] { cut.group->all_gather(shm::Blocks(list.data()), own.data, call); });
}

PyObject* reduce_scatter_list(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat own;
  TensorList list;
  Call call{Verb::kReduceScatter};
  if (count < 2 || count > 3 || !cut.tensors.read(args[0], own) || !list.read(cut.tensors, cut.group->ranks(), args[1], own)) Py_RETURN_FALSE;
  if (!read_op(count > 2 ? args[2] : nullptr, own.dtype, call.op) || !list.are_apart_from(own, cut.group->rank())) Py_RETURN_FALSE;
  call.dtype = own.dtype;
  call.numel = own.numel;
  return run(static_cast<std::size_t>(cut.group->ranks()) * own.bytes(), [&] { cut.group->reduce_scatter(own.data, shm::Blocks(list.data()), call); });
}

PyObject* all_to_all_list(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat first;
  TensorList outputs, inputs;
  if (count != 2 || !PyList_CheckExact(args[1]) || PyList_GET_SIZE(args[1]) == 0 || !cut.tensors.read(PyList_GET_ITEM(args[1], 0), first)) Py_RETURN_FALSE;
  if (!outputs.read(cut.tensors, cut.group->ranks(), args[0], first) || !inputs.read(cut.tensors, cut.group->ranks(), args[1], first)) Py_RETURN_FALSE;
  if (!outputs.are_apart() || !outputs.are_apart_from(inputs)) Py_RETURN_FALSE;
  const auto ranks = static_cast<std::size_t>(cut.group->ranks());
  const std::vector<std::size_t> splits(ranks, first.numel);
  if (Group::may_be_read(first.bytes()) && !shm::lie_as_one(inputs.data(), splits.data(), ranks, item_bytes(first.dtype))) Py_RETURN_FALSE;
  Call call{Verb::kAllToAll};
  call.dtype = first.dtype;
  return run(ranks * first.bytes(), [&] { cut.group->all_to_all(outputs.data(), inputs.data(), splits.data(), splits.data(), call); });
}

template <bool starts>
PyObject* barrier(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  const Maker<starts> make(args, count);
  if (!make.is_well() || count != 0) Py_RETURN_FALSE;
  return make(cut, Call{Verb::kBarrier}, 0, Py_None, nullptr, [](Group& group, const Call& its) { group.barrier(its); });
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
  add(definition<all_reduce<false>>("all_reduce"));
  add(definition<all_reduce<true>>("start_all_reduce"));
  add(definition<broadcast<false>>("broadcast"));
  add(definition<broadcast<true>>("start_broadcast"));
  add(definition<all_gather_list>("all_gather"));
  add(definition<reduce_scatter_list>("reduce_scatter"));
  add(definition<all_to_all_list>("all_to_all"));
  add(definition<all_gather<false>>("all_gather_single"));
  add(definition<all_gather<true>>("start_all_gather_single"));
  add(definition<reduce_scatter<false>>("reduce_scatter_single"));
  add(definition<reduce_scatter<true>>("start_reduce_scatter_single"));
  add(definition<barrier<false>>("barrier"));
  add(definition<barrier<true>>("start_barrier"));
  add(definition<reduce<false>>("reduce"));
  add(definition<reduce<true>>("start_reduce"));
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
