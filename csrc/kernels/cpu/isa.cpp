// Picks the instruction set once.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <atomic>
#include <cstring>

#include "isa.h"

namespace pycomm {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
// As Ice Lake and Zen 4 have it, and what is newer. (What is older has no VBMI, and a lower clock under registers of 512 bits.)
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi");
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

std::atomic<const Isa*> isa_in_use{find_isa(nullptr)};

}  // namespace

const Isa& active_isa() { return *isa_in_use.load(std::memory_order_relaxed); }

void store_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

const char* cpu_isa() { return active_isa().name; }

bool use_cpu_isa(const char* name) {
  const Isa* isa = find_isa(name);
  if (isa != nullptr) isa_in_use.store(isa, std::memory_order_relaxed);
  return isa != nullptr;
}

}  // namespace pycomm
