// pycomm._native: the reduction kernels over addresses, element counts and the codes of pycomm/types.py.
#include "../kernels/reduce.h"
#include "gil.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(PYCOMM_WITH_CUDA)
#include "cuda_errors.h"
#endif

namespace py = pybind11;

namespace pycomm {
namespace {

using Addresses = std::vector<std::uintptr_t>;
using Factors = std::optional<std::vector<double>>;

// Raises ValueError unless reduce() can be called with these arguments.
void check(std::uintptr_t output, const Addresses& inputs, std::size_t numel, int dtype, int op,
           const Factors& factors) {
  if (dtype < 0 || dtype >= kDTypes || op < 0 || op >= kReduceOps ||
      !reduce_supported(static_cast<DType>(dtype), static_cast<ReduceOp>(op))) {
    throw py::value_error("reduce: operator " + std::to_string(op) + " is not defined on dtype " +
                          std::to_string(dtype));
  }
  if (inputs.empty()) throw py::value_error("reduce: needs at least one input, got none");
  if (static_cast<ReduceOp>(op) == ReduceOp::kPremulSum && (!factors || factors->size() != inputs.size())) {
    throw py::value_error("reduce: PREMUL_SUM needs a factor for each of the " + std::to_string(inputs.size()) +
                          " inputs, got " + (factors ? std::to_string(factors->size()) : "none"));
  }
  const std::size_t bytes = numel * item_bytes(static_cast<DType>(dtype));
  for (const std::uintptr_t input : inputs) {
    const bool is_apart = input + bytes <= output || output + bytes <= input;
    if (input != output && !is_apart)
      throw py::value_error("reduce: the output overlaps an input without being that input");
  }
}

const void* const* pointers(const Addresses& addresses) {
  static_assert(sizeof(std::uintptr_t) == sizeof(void*));
  return reinterpret_cast<const void* const*>(addresses.data());
}

void reduce_on_cpu(std::uintptr_t output, const Addresses& inputs, std::size_t numel, int dtype, int op,
                   const Factors& factors, bool stream_output) {
  check(output, inputs, numel, dtype, op, factors);
  const WithoutGil released;
  reduce(reinterpret_cast<void*>(output), pointers(inputs), static_cast<int>(inputs.size()), numel,
         static_cast<DType>(dtype), static_cast<ReduceOp>(op), factors ? factors->data() : nullptr, stream_output);
}

#if defined(PYCOMM_WITH_CUDA)
void reduce_on_cuda(std::uintptr_t output, const Addresses& inputs, std::size_t numel, int dtype, int op,
                    const Factors& factors, std::uintptr_t stream) {
  check(output, inputs, numel, dtype, op, factors);
  if (inputs.size() > static_cast<std::size_t>(kMaxCudaInputs)) {
    throw py::value_error("reduce_cuda: takes at most " + std::to_string(kMaxCudaInputs) + " inputs, got " +
                          std::to_string(inputs.size()));
  }
  int error = 0;
  {
    const WithoutGil released;
    error = reduce_cuda(reinterpret_cast<void*>(output), pointers(inputs), static_cast<int>(inputs.size()), numel,
                        static_cast<DType>(dtype), static_cast<ReduceOp>(op), factors ? factors->data() : nullptr,
                        reinterpret_cast<void*>(stream));
  }
  check_cuda("reduce_cuda", error);
}
#endif

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("reduce", &reduce_on_cpu, py::arg("output"), py::arg("inputs"), py::arg("numel"), py::arg("dtype"),
        py::arg("op"), py::arg("factors") = py::none(), py::arg("stream_output") = false,
        "output[i] = inputs[0][i] op inputs[1][i] op ..., over addresses of CPU memory. Raises ValueError.");
  m.def(
      "reduce_supported",
      [](int dtype, int op) {
        return dtype >= 0 && op >= 0 && reduce_supported(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
      },
      py::arg("dtype"), py::arg("op"), "Whether the operator is defined on the element type.");
  m.def(
      "reduce_kernels",
      [] {
        static constexpr ReduceKernels kKernels{&reduce_supported, &reduce};
        return reinterpret_cast<std::uintptr_t>(&kKernels);
      },
      "Address of the kernels, for pycomm's torch operators.");
  m.def("cpu_isa", &cpu_isa, "The instruction set that the CPU kernels use: 'avx512', 'avx2' or 'generic'.");
  m.def(
      "_reduce_isa", &use_cpu_isa, py::arg("name").none(true),
      "Makes the kernels use this instruction set (None: the best). False if the machine has no such set. For tests.");
#if defined(PYCOMM_WITH_CUDA)
  m.def(
      "reduce_cuda", &reduce_on_cuda, py::arg("output"), py::arg("inputs"), py::arg("numel"), py::arg("dtype"),
      py::arg("op"), py::arg("factors"), py::arg("stream"),
      "As reduce, over addresses of the current device's memory, queued on a stream. Raises ValueError, RuntimeError.");
#endif
}

}  // namespace pycomm
