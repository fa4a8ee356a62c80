// reduce.h and read_ahead.h for the tests of csrc/shm: float32, in plain loops. Those are about who reads and writes what when; the kernels
// take minutes to compile under a sanitizer, and have tests of their own.
#include "kernels/read_ahead.h"
#include "kernels/reduce.h"

#include <algorithm>
#include <cstring>

namespace pycomm {
namespace {

constexpr std::size_t kBlock = 1024;

// On copies of this thread's own, so that ThreadSanitizer sees each block of a rank as a whole, and not each of its floats.
__attribute__((no_sanitize("thread"))) void add(float* total, const float* input, float factor, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) total[i] += factor * input[i];
}

__attribute__((no_sanitize("thread"))) void divide(float* total, float divisor, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) total[i] /= divisor;
}

}  // namespace

void reduce_to_all(void* const* outputs, int num_outputs, const void* const* inputs, int num_inputs, std::size_t numel,
                   DType dtype, ReduceOp op, const double* factors, int divisor, bool) {
  const bool is_known = dtype == DType::kFloat32 && (op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kPremulSum);
  if (!is_known) __builtin_abort();
  float total[kBlock], input[kBlock];
  for (std::size_t first = 0, length; first < numel; first += length) {
    length = std::min(kBlock, numel - first);
    std::memset(total, 0, length * sizeof(float));
    for (int j = 0; j < num_inputs; ++j) {
      std::memcpy(input, static_cast<const float*>(inputs[j]) + first, length * sizeof(float));
      add(total, input, op == ReduceOp::kPremulSum ? static_cast<float>(factors[j]) : 1.0f, length);
    }
    if (op == ReduceOp::kAvg) divide(total, static_cast<float>(divisor), length);
    for (int o = 0; o < num_outputs; ++o) std::memcpy(static_cast<float*>(outputs[o]) + first, total, length * sizeof(float));
  }
}

void reduce(void* output, const void* const* inputs, int num_inputs, std::size_t numel, DType dtype, ReduceOp op,
            const double* factors, bool) {
  reduce_to_all(&output, 1, inputs, num_inputs, numel, dtype, op, factors, num_inputs);
}

void copy_streamed(void* destination, const void* source, std::size_t bytes) { std::memcpy(destination, source, bytes); }

void copy_streamed_unfenced(void* destination, const void* source, std::size_t bytes) { copy_streamed(destination, source, bytes); }

void store_fence() {}

bool pages_win() { return true; }

}  // namespace pycomm
