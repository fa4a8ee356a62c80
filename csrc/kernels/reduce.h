// n inputs -> one output, combined in their order, so that every rank that reduces the same inputs gets the same bits.
#pragma once

#include "../types.h"

namespace pycomm {

// Whether `op` is defined on `dtype` (a bitwise op on floats is not, MIN of complex numbers is not, ...).
bool reduce_supported(DType dtype, ReduceOp op);

// output[i] = inputs[0][i] op inputs[1][i] op ... for i < numel. Any alignment.
//   - `output` may be one of the inputs, or not overlap any of them.
//   - 16- and 8-bit floats accumulate in float32 and round once, at the end, as torch casts.
//   - kAvg divides the sum by `num_inputs`. kPremulSum scales input j by factors[j] first, and rounds; `factors` is read
//     for that op alone.
//   - MIN and MAX give NaN where any input is NaN, and the earlier of two equals (0.0 and -0.0 are).
//   - Every NaN in the output is the quiet, positive one: the bits depend neither on the machine nor on i.
//   - `stream_output` writes with non-temporal stores, then a store fence: right when nobody on this core reads the
//     output soon.
// Allocates nothing, throws nothing. Bytes moved per element: (num_inputs + 1) * itemsize. `op` is defined on `dtype`.
void reduce(void* output, const void* const* inputs, int num_inputs, std::size_t numel, DType dtype, ReduceOp op,
            const double* factors, bool stream_output);

// The two above for a library that is not linked with them: pycomm's torch operators take them from the core.
struct ReduceKernels {
  decltype(&reduce_supported) is_supported;
  decltype(&reduce) run;
};

// As `reduce` without streaming, the result written to each of `outputs`, of which the first `num_outputs` count: while
// it is in registers, or at least in the L1 cache; kAvg divides by `divisor`, as an input may be a sum already. `stream_others`
// writes all outputs but the first with non-temporal stores, then a store fence: for those that other cores' caches hold.
// Bytes moved per element: (num_inputs + num_outputs) * itemsize.
void reduce_to_all(void* const* outputs, int num_outputs, const void* const* inputs, int num_inputs, std::size_t numel,
                   DType dtype, ReduceOp op, const double* factors, int divisor, bool stream_others = false);

// memcpy with non-temporal stores; ends with a store fence, so that a flag stored after it is seen after the bytes.
void copy_streamed(void* destination, const void* source, std::size_t bytes);
// The same without the fence, for one of several copies; after the last of them comes store_fence().
void copy_streamed_unfenced(void* destination, const void* source, std::size_t bytes);
void store_fence();

// The instruction set that the calls above use on this machine: "avx512", "avx2" or "generic".
const char* cpu_isa();

// Makes the calls above use the named instruction set, or the best one for null. False, and nothing changes, if this
// machine has no such set. For tests: all sets give the same bits.
bool use_cpu_isa(const char* name);

}  // namespace pycomm
