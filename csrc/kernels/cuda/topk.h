// topk() and scatter_add() for buffers that a GPU reads: the contract of ../topk.h, on a stream.
#pragma once

#include "../topk.h"

namespace pycomm {

// Queue the job on `stream` (a cudaStream_t) of the current device and return without waiting: no synchronization, no
// memory of their own, so they can be captured in a graph. Return a cudaError_t. The selection is the CPU's, bit for bit.

// `report` (three int32 in device memory, or null) takes what TopkResult says. If `is_reusing`, the guess is its first
// word, and job.guess does not count.
int topk_cuda(const TopkJob& job, std::int32_t* report, bool is_reusing, void* stream);

// flat[indices[i]] += values[i] * factor, in any order; or, if an index is outside 0 .. numel - 1, all of `flat` becomes
// NaN. `flag` is four bytes of device memory for the call's own use.
int scatter_add_cuda(float* flat, std::size_t numel, const std::int32_t* indices, const float* values, std::size_t count,
                     float factor, std::uint32_t* flag, void* stream);

}  // namespace pycomm
