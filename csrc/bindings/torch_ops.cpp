// torch.ops.pycomm.*: the operators that torch.compile sees, on torch's stable ABI (one library for torch 2.11 and
// later). The kernels are the core's: those for the CPU it hands over as the library is loaded, those for CUDA pycomm/ops
// adds. So this library is one file, which compiles in seconds and without nvcc.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <vector>

#include "../kernels/reduce.h"

namespace pycomm {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const ReduceKernels* kernels = nullptr;  // set once, before Python lets anyone call an operator

DType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Byte: return DType::kUInt8;
    case ScalarType::Char: return DType::kInt8;
    case ScalarType::UInt16: return DType::kUInt16;
    case ScalarType::Short: return DType::kInt16;
    case ScalarType::UInt32: return DType::kUInt32;
    case ScalarType::Int: return DType::kInt32;
    case ScalarType::UInt64: return DType::kUInt64;
    case ScalarType::Long: return DType::kInt64;
    case ScalarType::Bool: return DType::kBool;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Double: return DType::kFloat64;
    case ScalarType::ComplexFloat: return DType::kComplex64;
    case ScalarType::ComplexDouble: return DType::kComplex128;
    case ScalarType::Float8_e4m3fn: return DType::kFloat8E4M3FN;
    case ScalarType::Float8_e5m2: return DType::kFloat8E5M2;
    case ScalarType::Float8_e4m3fnuz: return DType::kFloat8E4M3FNUZ;
    case ScalarType::Float8_e5m2fnuz: return DType::kFloat8E5M2FNUZ;
    default: STD_TORCH_CHECK(false, "pycomm::reduce: the inputs have a dtype that pycomm does not reduce"); return {};
  }
}

bool same_sizes(const Tensor& a, const Tensor& b) {
  if (a.dim() != b.dim()) return false;
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) != b.size(dim)) return false;
  }
  return true;
}

// inputs: tensors of one shape and dtype; factors: one for each with PREMUL_SUM, else empty. A new contiguous tensor.
Tensor reduce_tensors(std::vector<Tensor> inputs, int64_t op, std::vector<double> factors) {
  STD_TORCH_CHECK(!inputs.empty(), "pycomm::reduce: needs at least one input, got none");
  STD_TORCH_CHECK(kernels != nullptr, "pycomm::reduce: load this library by pycomm.ops, which gives it its kernels");
  const Tensor& first = inputs[0];
  const DType dtype = dtype_of(first.scalar_type());
  STD_TORCH_CHECK(op >= 0 && op < kReduceOps && kernels->is_supported(dtype, static_cast<ReduceOp>(op)),
                  "pycomm::reduce: operator ", op, " is not defined on the inputs' dtype");
  const bool needs_factors = static_cast<ReduceOp>(op) == ReduceOp::kPremulSum;
  STD_TORCH_CHECK(factors.size() == (needs_factors ? inputs.size() : 0), "pycomm::reduce: expected ",
                  needs_factors ? inputs.size() : 0, " factors, got ", factors.size());
  std::vector<const void*> pointers;
  for (Tensor& input : inputs) {
    STD_TORCH_CHECK(input.scalar_type() == first.scalar_type() && same_sizes(input, first),
                    "pycomm::reduce: the inputs differ in shape or dtype");
    input = torch::stable::contiguous(input);
    pointers.push_back(input.const_data_ptr());
  }
  Tensor output = torch::stable::new_empty(first, first.sizes());
  kernels->run(output.mutable_data_ptr(), pointers.data(), static_cast<int>(pointers.size()),
               static_cast<std::size_t>(first.numel()), dtype, static_cast<ReduceOp>(op), factors.data(), false);
  return output;
}

}  // namespace
}  // namespace pycomm

// Gives the operators the core's kernels: the address that pycomm._native.reduce_kernels() returns.
extern "C" __attribute__((visibility("default"))) void pycomm_use_kernels(const pycomm::ReduceKernels* kernels) {
  pycomm::kernels = kernels;
}

STABLE_TORCH_LIBRARY(pycomm, m) { m.def("reduce(Tensor[] inputs, int op, float[] factors) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(pycomm, CPU, m) { m.impl("reduce", TORCH_BOX(&pycomm::reduce_tensors)); }
