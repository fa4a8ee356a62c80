// reduce() for buffers that a GPU reads: the contract of ../reduce.h, on a stream.
#pragma once

#include "../reduce.h"

namespace pycomm {

// The addresses of the inputs travel with the kernel's arguments, of which there are 4 KiB.
inline constexpr int kMaxCudaInputs = 128;

// Queues the reduction on `stream` (a cudaStream_t) of the current device and returns without waiting for it. Returns a
// cudaError_t: 0, or cudaErrorInvalidValue for num_inputs outside 1..kMaxCudaInputs or an undefined (dtype, op), or
// what CUDA said. `inputs` and `factors` are host arrays, free to go when the call returns; what they point to is not.
// The bits are those of the CPU. Synchronizes with nothing.
int reduce_cuda(void* output, const void* const* inputs, int num_inputs, std::size_t numel, DType dtype, ReduceOp op,
                const double* factors, void* stream);

// The current device, or -1.
int cuda_current_device();

// CUDA's words for what reduce_cuda returned.
const char* cuda_error_string(int error);

}  // namespace pycomm
