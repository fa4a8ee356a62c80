// The short cuts of the shared-memory transport: `fast(tensor, op)` and its kin, plain C functions over the user's own tensor.
//
// Each answers True if the collective is done, and False, with nothing touched, if the arguments are not as plain as this
// path wants them (a torch CPU tensor, contiguous, of a type and operator that we have). The ordinary path then does it,
// or words the error.
#include "shm_fast.h"

#include "../kernels/reduce.h"
#include "dlpack_abi.h"
#include "shm_errors.h"

namespace pycomm {
namespace {

using shm::Call;
using shm::Group;
using shm::Verb;

// What a short cut needs beside its arguments. Owned by the capsule that is the C function's `self`.
struct Cut {
  std::shared_ptr<Group> group;
  PyTypeObject* types[2];              // torch.Tensor, torch.nn.Parameter: subclasses may mean something else
  const dlpack::ExchangeApi* api;
  PyObject* is_neg;                    // torch.Tensor.is_neg
};

struct Flat {
  void* data;
  std::size_t numel;
  DType dtype;
  std::size_t bytes() const { return numel * item_bytes(dtype); }
};

bool dtype_of(const dlpack::Tensor& tensor, DType& dtype) {
  const int bytes = tensor.dtype.bits / 8;
  const int log2 = bytes == 1 ? 0 : bytes == 2 ? 1 : bytes == 4 ? 2 : bytes == 8 ? 3 : bytes == 16 ? 4 : -1;
  if (log2 < 0 || tensor.dtype.lanes != 1) return false;
  switch (tensor.dtype.code) {
    case dlpack::kUInt: dtype = static_cast<DType>(2 * log2); return log2 <= 3;
    case dlpack::kInt: dtype = static_cast<DType>(2 * log2 + 1); return log2 <= 3;
    case dlpack::kFloat:
      dtype = log2 == 1 ? DType::kFloat16 : log2 == 2 ? DType::kFloat32 : DType::kFloat64;
      return log2 >= 1 && log2 <= 3;
    case dlpack::kBfloat: dtype = DType::kBFloat16; return log2 == 1;
    case dlpack::kBool: dtype = DType::kBool; return log2 == 0;
    case dlpack::kFloat8E4M3FN: dtype = DType::kFloat8E4M3FN; return log2 == 0;
    case dlpack::kFloat8E4M3FNUZ: dtype = DType::kFloat8E4M3FNUZ; return log2 == 0;
    case dlpack::kFloat8E5M2: dtype = DType::kFloat8E5M2; return log2 == 0;
    case dlpack::kFloat8E5M2FNUZ: dtype = DType::kFloat8E5M2FNUZ; return log2 == 0;
    default: return false;  // complex tensors may be conjugate views, which DLPack does not tell
  }
}

bool is_contiguous(const dlpack::Tensor& tensor, std::size_t& numel) {
  std::int64_t expected = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.strides != nullptr && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  numel = static_cast<std::size_t>(expected);
  return true;
}

// Reads a tensor that the short cut can take.
bool read(const Cut& cut, PyObject* object, Flat& flat) {
  if (Py_TYPE(object) != cut.types[0] && Py_TYPE(object) != cut.types[1]) return false;
  dlpack::Tensor tensor;
  if (cut.api->tensor_from_py_object(object, &tensor) != 0) {
    PyErr_Clear();  // sparse, meta, quantized, ...
    return false;
  }
  if (tensor.device_type != dlpack::kCPU || !dtype_of(tensor, flat.dtype) || !is_contiguous(tensor, flat.numel) || flat.numel == 0) return false;
  flat.data = static_cast<unsigned char*>(tensor.data) + tensor.byte_offset;
  // The imaginary part of a conjugate is a view with a negation bit, which DLPack does not tell either. Such a view has
  // stride 2, so it fails the test above, unless it has one element. That one lies an odd number of items into memory
  // that is aligned for complex numbers; only there torch has to be asked.
  if (flat.numel != 1 || reinterpret_cast<std::uintptr_t>(flat.data) % (2 * item_bytes(flat.dtype)) == 0) return true;
  PyObject* is_negative = PyObject_CallOneArg(cut.is_neg, object);
  if (is_negative == nullptr) PyErr_Clear();
  Py_XDECREF(is_negative);
  return is_negative == Py_False;
}

// `object` is null where the caller left the operator out.
bool read_op(PyObject* object, DType dtype, ReduceOp& op) {
  if (object == nullptr) {
    op = ReduceOp::kSum;
    return reduce_supported(dtype, op);
  }
  if (!PyLong_Check(object)) return false;
  const long code = PyLong_AsLong(object);
  if (code < 0 || code > static_cast<long>(ReduceOp::kAvg)) {
    PyErr_Clear();
    return false;
  }
  op = static_cast<ReduceOp>(code);
  return reduce_supported(dtype, op);
}

constexpr std::size_t kLongBytes = 16 * 1024;  // from here on the lock is let go for the copying alone

template <class Run>
PyObject* run(std::size_t bytes, Run run_collective) {
  try {
    const LazyGilRelease release(bytes >= kLongBytes);
    run_collective();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  Py_RETURN_TRUE;
}

Cut& cut_of(PyObject* self) { return *static_cast<Cut*>(PyCapsule_GetPointer(self, nullptr)); }

PyObject* all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat flat;
  Call call{Verb::kAllReduce};
  if (count < 1 || count > 2 || !read(cut, args[0], flat) || !read_op(count > 1 ? args[1] : nullptr, flat.dtype, call.op)) Py_RETURN_FALSE;
  call.dtype = flat.dtype;
  call.numel = flat.numel;
  return run(flat.bytes(), [&] { cut.group->all_reduce(flat.data, flat.data, call); });
}

PyObject* broadcast(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat flat;
  Call call{Verb::kBroadcast};
  if (count != 2 || !PyLong_Check(args[1]) || !read(cut, args[0], flat)) Py_RETURN_FALSE;
  const long root = PyLong_AsLong(args[1]);
  if (root < 0 || root >= cut.group->ranks()) {
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  call.dtype = flat.dtype;
  call.numel = flat.numel;
  call.root = static_cast<int>(root);
  return run(flat.bytes(), [&] { cut.group->broadcast(flat.data, call); });
}

bool overlap(const Flat& a, const Flat& b) {
  const auto* a_start = static_cast<unsigned char*>(a.data);
  const auto* b_start = static_cast<unsigned char*>(b.data);
  return a_start < b_start + b.bytes() && b_start < a_start + a.bytes();
}

PyObject* all_gather(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat output, input;
  if (count != 2 || !read(cut, args[0], output) || !read(cut, args[1], input)) Py_RETURN_FALSE;
  const auto ranks = static_cast<std::size_t>(cut.group->ranks());
  if (output.dtype != input.dtype || output.numel != ranks * input.numel || overlap(output, input)) Py_RETURN_FALSE;
  Call call{Verb::kAllGather};
  call.dtype = input.dtype;
  call.numel = input.numel;
  return run(output.bytes(), [&] { cut.group->all_gather(output.data, input.data, call); });
}

PyObject* reduce_scatter(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const Cut& cut = cut_of(self);
  Flat output, input;
  Call call{Verb::kReduceScatter};
  if (count < 2 || count > 3 || !read(cut, args[0], output) || !read(cut, args[1], input)) Py_RETURN_FALSE;
  if (!read_op(count > 2 ? args[2] : nullptr, input.dtype, call.op)) Py_RETURN_FALSE;
  const auto ranks = static_cast<std::size_t>(cut.group->ranks());
  if (output.dtype != input.dtype || input.numel != ranks * output.numel || overlap(output, input)) Py_RETURN_FALSE;
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
                            "True if the collective is done, False if the ordinary path must do it."};
  return &method;
}

void destroy(PyObject* capsule) {
  auto* cut = static_cast<Cut*>(PyCapsule_GetPointer(capsule, nullptr));
  Py_DECREF(cut->types[0]);
  Py_DECREF(cut->types[1]);
  Py_DECREF(cut->is_neg);
  delete cut;
}

}  // namespace

pybind11::dict short_cuts(std::shared_ptr<Group> group, const pybind11::object& tensor, const pybind11::object& parameter) {
  pybind11::dict cuts;
  auto* type = reinterpret_cast<PyTypeObject*>(tensor.ptr());
  const dlpack::ExchangeApi* api = dlpack::exchange_api(type);
  if (api == nullptr) return cuts;
  auto* cut = new Cut{std::move(group), {type, reinterpret_cast<PyTypeObject*>(parameter.inc_ref().ptr())}, api, nullptr};
  Py_INCREF(type);
  cut->is_neg = pybind11::object(tensor.attr("is_neg")).release().ptr();
  const auto self = pybind11::reinterpret_steal<pybind11::object>(PyCapsule_New(cut, nullptr, destroy));
  const auto add = [&](PyMethodDef* method) {
    cuts[method->ml_name] = pybind11::reinterpret_steal<pybind11::object>(PyCFunction_New(method, self.ptr()));
  };
  add(definition<all_reduce>("all_reduce"));
  add(definition<broadcast>("broadcast"));
  add(definition<all_gather>("all_gather_single"));
  add(definition<reduce_scatter>("reduce_scatter_single"));
  add(definition<barrier>("barrier"));
  return cuts;
}

}  // namespace pycomm
