// Picks the instruction set once, and hands the calls on.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstring>

#include "isa.h"

namespace pycomm {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// The instruction set of this name if the machine has it; the best there is for null.
const Isa* find_isa(const char* name) {
  const auto wanted = [name](const Isa& isa) { return name == nullptr || std::strcmp(name, isa.name) == 0; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (wanted(kAvx512) && has_avx512()) return &kAvx512;
  if (wanted(kAvx2) && has_avx2()) return &kAvx2;
#endif
  return wanted(kGeneric) ? &kGeneric : nullptr;
}

std::atomic<const Isa*> active_isa{find_isa(nullptr)};

const Isa& active() { return *active_isa.load(std::memory_order_relaxed); }

// Streamed stores are not ordered with later ones by themselves.
void store_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

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

}  // namespace

bool reduce_supported(DType dtype, ReduceOp op) {
  const int row = static_cast<int>(dtype), column = static_cast<int>(op);
  return row < kDTypes && column < kReduceOps && kGeneric.reduce[row][column].run != nullptr;
}

void reduce(void* output, const void* const* inputs, int num_inputs, std::size_t numel, DType dtype, ReduceOp op,
            const double* factors, bool stream_output) {
  const Isa& isa = active();
  const ReduceKernel& kernel = isa.reduce[static_cast<int>(dtype)][static_cast<int>(op)];
  const ReduceJob job{static_cast<char*>(output), reinterpret_cast<const char* const*>(inputs), 0,
                      numel * item_bytes(dtype), factors, num_inputs};
  if (!stream_output) return kernel.run(job);
  if (kernel.run_streamed != nullptr) {
    kernel.run_streamed(job);
  } else {
    reduce_by_blocks(isa, kernel, job);
  }
  store_fence();
}

void copy_streamed(void* destination, const void* source, std::size_t bytes) {
  active().copy_streamed(static_cast<char*>(destination), static_cast<const char*>(source), bytes);
  store_fence();
}

const char* cpu_isa() { return active().name; }

bool use_cpu_isa(const char* name) {
  const Isa* isa = find_isa(name);
  if (isa != nullptr) active_isa.store(isa, std::memory_order_relaxed);
  return isa != nullptr;
}

}  // namespace pycomm
