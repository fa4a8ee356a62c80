// reduce.h for the tests of csrc/shm: float32, in plain loops. Those are about who reads and writes what when; the kernels
// take minutes to compile under a sanitizer, and have tests of their own.
#include "kernels/reduce.h"

#include <cstring>

namespace pycomm {

void reduce_to_all(void* const* outputs, int num_outputs, const void* const* inputs, int num_inputs, std::size_t numel,
                   DType dtype, ReduceOp op, const double* factors, int divisor) {
  const bool is_known = dtype == DType::kFloat32 && (op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kPremulSum);
  if (!is_known) __builtin_abort();
  for (std::size_t i = 0; i < numel; ++i) {
    float total = 0;
    for (int j = 0; j < num_inputs; ++j) {
      const float factor = op == ReduceOp::kPremulSum ? static_cast<float>(factors[j]) : 1.0f;
      total += factor * static_cast<const float*>(inputs[j])[i];
    }
    static_cast<float*>(outputs[0])[i] = op == ReduceOp::kAvg ? total / static_cast<float>(divisor) : total;
  }
  for (int o = 1; o < num_outputs; ++o) std::memcpy(outputs[o], outputs[0], numel * item_bytes(dtype));
}

void reduce(void* output, const void* const* inputs, int num_inputs, std::size_t numel, DType dtype, ReduceOp op,
            const double* factors, bool) {
  reduce_to_all(&output, 1, inputs, num_inputs, numel, dtype, op, factors, num_inputs);
}

void copy_streamed(void* destination, const void* source, std::size_t bytes) { std::memcpy(destination, source, bytes); }

}  // namespace pycomm
