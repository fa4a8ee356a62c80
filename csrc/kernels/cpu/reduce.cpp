// Hands the calls of reduce.h on to the instruction set in use.
#include <algorithm>
#include <cstring>

#include "isa.h"

namespace pycomm {
namespace {

// Streams the output of a kernel that does not do so itself, by way of a block that stays in the L1 cache.
void reduce_by_blocks(const Isa& isa, const ReduceKernel& kernel, ReduceJob job) {
  alignas(64) char block[4096];
  char* const output = job.output;
  const std::size_t bytes = job.end;
  job.output = block;
  for (; job.begin < bytes; job.begin = job.end) {
    job.end = std::min(bytes, job.begin + sizeof(block));
    kernel.run(job);
    isa.copy_streamed(output + job.begin, block, job.end - job.begin);
  }
}

// Writes to several outputs by way of the first, while it is in L1.
void reduce_to_all_by_blocks(const Isa& isa, const ReduceKernel& kernel, ReduceJob job, bool stream_others) {
  // Half of L1; streamed to where another core holds the lines, less is faster (4 KiB on Zen 5).
  const std::size_t block_bytes = (stream_others ? 4 : 16) * 1024;
  const std::size_t bytes = job.end;
  for (; job.begin < bytes; job.begin = job.end) {
    job.end = std::min(bytes, job.begin + block_bytes);
    job.output = job.outputs[0] + job.begin;
    kernel.run(job);
    for (int o = 1; o < job.num_outputs; ++o) {
      char* const output = job.outputs[o] + job.begin;
      if (stream_others) {
        isa.copy_streamed(output, job.output, job.end - job.begin);
      } else {
        std::memcpy(output, job.output, job.end - job.begin);
      }
    }
  }
}

}  // namespace

bool reduce_supported(DType dtype, ReduceOp op) {
  const int row = static_cast<int>(dtype), column = static_cast<int>(op);
  return row < kDTypes && column < kReduceOps && kGeneric.reduce[row][column].run != nullptr;
}

void reduce(void* output, const void* const* inputs, int num_inputs, std::size_t numel, DType dtype, ReduceOp op,
            const double* factors, bool stream_output) {
  const Isa& isa = active_isa();
  const ReduceKernel& kernel = isa.reduce[static_cast<int>(dtype)][static_cast<int>(op)];
  const ReduceJob job{static_cast<char*>(output), nullptr, reinterpret_cast<const char* const*>(inputs), 0,
                      numel * item_bytes(dtype), factors, num_inputs, 1, num_inputs};
  if (!stream_output) return kernel.run(job);
  if (kernel.run_streamed != nullptr) {
    kernel.run_streamed(job);
  } else {
    reduce_by_blocks(isa, kernel, job);
  }
  store_fence();
}

void reduce_to_all(void* const* outputs, int num_outputs, const void* const* inputs, int num_inputs, std::size_t numel,
                   DType dtype, ReduceOp op, const double* factors, int divisor, bool stream_others) {
  const Isa& isa = active_isa();
  const ReduceKernel& kernel = isa.reduce[static_cast<int>(dtype)][static_cast<int>(op)];
  const ReduceJob job{nullptr, reinterpret_cast<char* const*>(outputs), reinterpret_cast<const char* const*>(inputs), 0,
                      numel * item_bytes(dtype), factors, num_inputs, num_outputs, divisor};
  if (kernel.run_to_all != nullptr && !stream_others) return kernel.run_to_all(job);
  reduce_to_all_by_blocks(isa, kernel, job, stream_others);
  if (stream_others) store_fence();
}

void copy_streamed_unfenced(void* destination, const void* source, std::size_t bytes) {
  active_isa().copy_streamed(static_cast<char*>(destination), static_cast<const char*>(source), bytes);
}

void copy_streamed(void* destination, const void* source, std::size_t bytes) {
  copy_streamed_unfenced(destination, source, bytes);
  store_fence();
}

}  // namespace pycomm
