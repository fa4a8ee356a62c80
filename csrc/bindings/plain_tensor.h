// What a short cut reads of the user's own arguments: a torch CPU tensor, contiguous, and an operator defined on its type.
// Anything else it leaves to the ordinary path, which serves it or words the error.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "../kernels/reduce.h"
#include "dlpack_abi.h"

namespace pycomm {

struct Flat {
  void* data;
  std::size_t numel;
  std::size_t rows;  // its first dimension; 0 if it has none
  DType dtype;
  int ndim;
  dlpack::DeviceType device_type;
  std::int32_t device_id;
  std::size_t bytes() const { return numel * item_bytes(dtype); }
};

inline bool dtype_of(const dlpack::Tensor& tensor, DType& dtype) {
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
    case dlpack::kComplex: dtype = log2 == 3 ? DType::kComplex64 : DType::kComplex128; return log2 == 3 || log2 == 4;
    case dlpack::kBool: dtype = DType::kBool; return log2 == 0;
    case dlpack::kFloat8E4M3FN: dtype = DType::kFloat8E4M3FN; return log2 == 0;
    case dlpack::kFloat8E4M3FNUZ: dtype = DType::kFloat8E4M3FNUZ; return log2 == 0;
    case dlpack::kFloat8E5M2: dtype = DType::kFloat8E5M2; return log2 == 0;
    case dlpack::kFloat8E5M2FNUZ: dtype = DType::kFloat8E5M2FNUZ; return log2 == 0;
    default: return false;
  }
}

inline bool is_contiguous(const dlpack::Tensor& tensor, std::size_t& numel) {
  std::int64_t expected = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.strides != nullptr && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  numel = static_cast<std::size_t>(expected);
  return true;
}

// Reads tensors of torch.Tensor and torch.nn.Parameter themselves: subclasses may mean something else.
class PlainTensors {
 public:
  PlainTensors(const pybind11::object& tensor, const pybind11::object& parameter)
      : types_{tensor, parameter}, is_neg_(tensor.attr("is_neg")), is_conj_(tensor.attr("is_conj")), api_(dlpack::exchange_api(type(0))) {
    const auto torch = pybind11::module_::import("torch");
    bytes_[0] = torch.attr("uint8"), bytes_[1] = torch.attr("int8");
  }

  bool can_read() const { return api_ != nullptr; }  // else this torch offers no DLPack C exchange

  const dlpack::ExchangeApi* api() const { return api_; }

  // False, and no Python error set, if the short cut cannot take `object`.
  bool read(PyObject* object, Flat& flat) const { return read_anywhere(object, flat) && flat.device_type == dlpack::kCPU; }

  // The same of a tensor on any device.
  bool read_anywhere(PyObject* object, Flat& flat) const {
    if (Py_TYPE(object) != type(0) && Py_TYPE(object) != type(1)) return false;
    dlpack::Tensor tensor;
    if (api_->tensor_from_py_object(object, &tensor) != 0) {
      PyErr_Clear();  // sparse, meta, quantized, ...
      return false;
    }
    flat.device_type = tensor.device_type, flat.device_id = tensor.device_id, flat.ndim = tensor.ndim;
    if (!dtype_of(tensor, flat.dtype) || !is_contiguous(tensor, flat.numel) || flat.numel == 0) return false;
    if (is_less_than_a_byte(object, flat.dtype)) return false;
    if (tensor.data == nullptr) return false;  // a wrapper without memory of its own, inside torch.func.functionalize
    flat.rows = tensor.ndim > 0 ? static_cast<std::size_t>(tensor.shape[0]) : 0;
    flat.data = static_cast<unsigned char*>(tensor.data) + tensor.byte_offset;
    // DLPack tells neither conjugate nor negated views.
    if (is_complex(flat.dtype)) return is_false(is_conj_, object) && is_false(is_neg_, object);
    // The imaginary part of a conjugate is a negated view. Such a view has stride 2, so it fails the test above, unless it
    // has one element. That one lies an odd number of items into memory that is aligned for complex numbers; only there
    // torch has to be asked.
    if (flat.numel != 1 || reinterpret_cast<std::uintptr_t>(flat.data) % (2 * item_bytes(flat.dtype)) == 0) return true;
    return is_false(is_neg_, object);
  }

 private:
  // DLPack is told of torch.int1 to torch.uint7 that they are integers of 8 bits; to add those up would mean nothing.
  bool is_less_than_a_byte(PyObject* object, DType dtype) const {
    if (dtype != DType::kUInt8 && dtype != DType::kInt8) return false;
    PyObject* const found = PyObject_GetAttr(object, name_dtype_.ptr());
    if (found == nullptr) PyErr_Clear();
    Py_XDECREF(found);
    return found != bytes_[dtype == DType::kInt8].ptr();
  }

  static bool is_complex(DType dtype) { return dtype == DType::kComplex64 || dtype == DType::kComplex128; }

  static bool is_false(const pybind11::object& method, PyObject* object) {
    PyObject* const answer = PyObject_CallOneArg(method.ptr(), object);
    if (answer == nullptr) PyErr_Clear();
    Py_XDECREF(answer);
    return answer == Py_False;
  }

  PyTypeObject* type(int i) const { return reinterpret_cast<PyTypeObject*>(types_[i].ptr()); }

  pybind11::object types_[2];
  pybind11::object is_neg_, is_conj_;
  pybind11::object bytes_[2];  // torch.uint8 and torch.int8
  pybind11::str name_dtype_{"dtype"};
  const dlpack::ExchangeApi* api_;
};

inline bool do_overlap(const Flat& a, const Flat& b) {
  const auto* a_start = static_cast<unsigned char*>(a.data);
  const auto* b_start = static_cast<unsigned char*>(b.data);
  return a_start < b_start + b.bytes() && b_start < a_start + a.bytes();
}

// Reads a tensor of `ranks` parts and one of a part, which is rank's own place in the other or not in it at all.
inline bool read_whole_and_part(const PlainTensors& tensors, PyObject* whole_object, PyObject* part_object, int rank, int ranks, Flat& whole, Flat& part) {
  if (!tensors.read(whole_object, whole) || !tensors.read(part_object, part)) return false;
  if (whole.dtype != part.dtype || whole.numel != static_cast<std::size_t>(ranks) * part.numel) return false;
  const auto* own = static_cast<unsigned char*>(whole.data) + static_cast<std::size_t>(rank) * part.bytes();
  return part.data == own || !do_overlap(whole, part);
}

// Reads a rank of a group of `ranks`.
inline bool read_rank(PyObject* object, int ranks, int& rank) {
  if (!PyLong_Check(object)) return false;
  const long read = PyLong_AsLong(object);
  if (read < 0 || read >= ranks) {
    PyErr_Clear();
    return false;
  }
  rank = static_cast<int>(read);
  return true;
}

// torch's own operators, at the places of ours; null where there are none. They live as long as torch does.
inline PyObject* torch_operators[static_cast<int>(ReduceOp::kAvg) + 1] = {};

// Reads an operator, which `object`, null where the caller left it out, has to define on `dtype` without a factor.
inline bool read_op(PyObject* object, DType dtype, ReduceOp& op) {
  if (object == nullptr) {
    op = ReduceOp::kSum;
    return reduce_supported(dtype, op);
  }
  const auto torchs = std::find(std::begin(torch_operators), std::end(torch_operators), object);
  if (torchs != std::end(torch_operators)) {
    op = static_cast<ReduceOp>(torchs - std::begin(torch_operators));
    return reduce_supported(dtype, op);
  }
  if (!PyLong_Check(object) || PyLong_CheckExact(object) || PyBool_Check(object)) return false;  // a member of ReduceOp is none of the latter
  const long code = PyLong_AsLong(object);
  if (code < 0 || code > static_cast<long>(ReduceOp::kAvg)) {
    PyErr_Clear();
    return false;
  }
  op = static_cast<ReduceOp>(code);
  return reduce_supported(dtype, op);
}

}  // namespace pycomm
