// quantize() and dequantize() for buffers that a GPU reads: the contract of ../quantize.h, on a stream.
#pragma once

#include "../quantize.h"

namespace pycomm {

// Queue the job on `stream` (a cudaStream_t) of the current device and return without waiting: no synchronization, no
// memory of their own, so they can be captured in a graph. All blocks are done, whatever first_block and last_block say.
// Return a cudaError_t. The payloads are those of the CPU, bit for bit.
int quantize_cuda(const QuantizeJob& job, void* stream);
int dequantize_cuda(const DequantizeJob& job, void* stream);

}  // namespace pycomm
