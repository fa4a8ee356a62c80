// pack() and unpack() for tensors and buckets that a GPU reads: the contract of ../pack.h, on a stream.
#pragma once

#include "../pack.h"

namespace pycomm {

// Queue the job on `stream` (a cudaStream_t) of the current device and return without waiting: no synchronization, no
// memory of their own, so they can be captured in a graph. `parts` and what they point to except `data` is host memory,
// free to go when the call returns. All is moved, whatever begin and end say. Return a cudaError_t. The bits are the CPU's.
int pack_cuda(const PackJob& job, void* stream);
int unpack_cuda(const PackJob& job, void* stream);

}  // namespace pycomm
