// The idea: a thread takes 16 bytes of every input at a time, goes over the inputs in order with the totals in
// registers, and writes 16 bytes: (num_inputs + 1) * itemsize bytes moved per element, the least there is. The loop
// strides over the whole grid. Unaligned buffers, and what is left at the end, go element by element.
#include "../common/cases.h"
#include "launch.h"
#include "reduce.h"

namespace pycomm {
namespace {

constexpr int kBlocksPerMultiprocessor = 8;

struct Inputs {
  const void* data[kMaxCudaInputs];
  double factors[kMaxCudaInputs];
  int count;
};

template <class Storage>
struct alignas(16) Pack {
  static constexpr int kItems = 16 / sizeof(Storage);
  Storage item[kItems];
};

template <class Element, class Op>
__device__ typename Element::Value read_input(typename Element::Storage stored, double factor) {
  const auto value = Element::template decode<Scalar>(stored);
  if constexpr (Op::kScalesInputs) {
    return multiply(value, static_cast<typename Element::Value>(factor));
  } else {
    return value;
  }
}

template <class Element, class Op>
__device__ typename Element::Storage finish(typename Element::Value total, int count) {
  if constexpr (Op::kAverages) total = total / static_cast<typename Element::Value>(count);
  return Element::template encode<Scalar>(total);
}

// Reduces element or pack `i`; `Stored` is a Pack, or another struct with `item` and `kItems`.
template <class Element, class Op, class Stored>
__device__ void reduce_one(void* output, const Inputs& inputs, std::size_t i) {
  typename Element::Value total[Stored::kItems];
  Stored stored = static_cast<const Stored*>(inputs.data[0])[i];
#pragma unroll
  for (int k = 0; k < Stored::kItems; ++k) total[k] = read_input<Element, Op>(stored.item[k], inputs.factors[0]);
  for (int j = 1; j < inputs.count; ++j) {
    stored = static_cast<const Stored*>(inputs.data[j])[i];
    const double factor = inputs.factors[j];
#pragma unroll
    for (int k = 0; k < Stored::kItems; ++k) {
      total[k] = Op::combine(total[k], read_input<Element, Op>(stored.item[k], factor));
    }
  }
#pragma unroll
  for (int k = 0; k < Stored::kItems; ++k) stored.item[k] = finish<Element, Op>(total[k], inputs.count);
  static_cast<Stored*>(output)[i] = stored;
}

template <class Storage>
struct One {
  static constexpr int kItems = 1;
  Storage item[1];
};

template <class Element, class Op>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(void* output, const __grid_constant__ Inputs inputs, std::size_t numel, std::size_t num_packs) {
  using Storage = typename Element::Storage;
  const std::size_t first = blockIdx.x * std::size_t{kThreads} + threadIdx.x;
  const std::size_t stride = std::size_t{gridDim.x} * kThreads;
  for (std::size_t i = first; i < num_packs; i += stride) reduce_one<Element, Op, Pack<Storage>>(output, inputs, i);
  for (std::size_t i = num_packs * Pack<Storage>::kItems + first; i < numel; i += stride) {
    reduce_one<Element, Op, One<Storage>>(output, inputs, i);
  }
}

template <class Element, class Op>
cudaError_t launch(void* output, const Inputs& inputs, std::size_t bytes, void* stream) {
  using Storage = typename Element::Storage;
  const std::size_t numel = bytes / sizeof(Storage);
  bool is_all_aligned = is_aligned16(output);
  for (int j = 0; j < inputs.count; ++j) is_all_aligned = is_all_aligned && is_aligned16(inputs.data[j]);
  const std::size_t num_packs = is_all_aligned ? numel / Pack<Storage>::kItems : 0;
  unsigned blocks = 0;
  const cudaError_t error = count_blocks(num_packs != 0 ? num_packs : numel, kBlocksPerMultiprocessor, &blocks);
  if (error != cudaSuccess) return error;
  return launch_kernel(&reduce_kernel<Element, Op>, blocks, kThreads, stream, output, inputs, numel, num_packs);
}

}  // namespace

int reduce_cuda(void* output, const void* const* inputs, int num_inputs, std::size_t numel, DType dtype, ReduceOp op,
                const double* factors, void* stream) {
  if (num_inputs < 1 || num_inputs > kMaxCudaInputs || !reduce_supported(dtype, op)) return cudaErrorInvalidValue;
  if (numel == 0) return cudaSuccess;
  Inputs arguments;
  arguments.count = num_inputs;
  for (int j = 0; j < num_inputs; ++j) {
    arguments.data[j] = inputs[j];
    arguments.factors[j] = op == ReduceOp::kPremulSum ? factors[j] : 1.0;
  }
  const std::size_t bytes = numel * item_bytes(dtype);
  return visit_case(dtype, op, [&](auto element, auto op_type) {
    return launch<decltype(element), decltype(op_type)>(output, arguments, bytes, stream);
  });
}

int cuda_current_device() {
  int device = -1;
  return cudaGetDevice(&device) == cudaSuccess ? device : -1;
}

const char* cuda_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace pycomm
