#include "stores.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <sys/mman.h>

#include <algorithm>
#include <memory>

#include "../kernels/forget.h"
#include "wait.h"

namespace pycomm::shm {
namespace {

constexpr std::size_t kMemoryBytes = 4u << 20;   // more than an L2 holds
constexpr std::size_t kSourceBytes = 32u << 10;  // stays in it, as what is copied to a result does
constexpr int kTries = 6;  // the best counts: something else may have had the memory during the others
constexpr std::size_t kProbes = 4;
// What plain stores leave in the caches is written back after the trial has ended. So on Zen 5 it finds non-temporal ones at 0.6 to 0.95, and
// two ranks' all_gather of 4 MiB takes 0.4 of the time by them.
constexpr double kWrittenBack = 1.1;
constexpr std::uint64_t kFartherBy = 2;  // memory than the caches; else one line more in them would look the same

// What it takes to read a line of each of a few pages. The middle ones: no prefetcher has brought them, and the address of the page is known
// from its first line.
std::uint64_t time_lines([[maybe_unused]] const void* data, [[maybe_unused]] std::size_t bytes) {
#if defined(__x86_64__)
  const auto read = [](std::uintptr_t address) { asm volatile("" ::"r"(*reinterpret_cast<const volatile char*>(address))); };
  const auto page = [&, start = reinterpret_cast<std::uintptr_t>(data)](std::size_t i) { return round_up(start + bytes / kProbes * i, kPage); };
  for (std::size_t i = 0; i < kProbes; ++i) read(page(i));
  _mm_lfence();
  const std::uint64_t start = __rdtsc();
  for (std::size_t i = 0; i < kProbes; ++i) {
    read(page(i) + kPage / 2);
    _mm_lfence();  // one after the other
  }
  return __rdtsc() - start;
#else
  return 0;
#endif
}

struct Found {
  bool streams_win = false;
  std::uint64_t far_ticks = UINT64_MAX;  // time_lines takes more of what lies in no cache
};

// Both of a pair of ranks try at about the same time, so they share the memory as they do in earnest.
Found try_memory() {
  void* const memory = mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) return {};
  const auto source = std::make_unique<unsigned char[]>(kSourceBytes);
  std::int64_t best_ns[2] = {INT64_MAX, INT64_MAX};
  std::uint64_t near_ticks = UINT64_MAX, far_ticks = UINT64_MAX;
  for (int i = 0; i < kTries; ++i) {
    for (const bool streams : {false, true}) {
      forget(memory, kMemoryBytes);  // a long result was last touched a step of training ago
      far_ticks = std::min(far_ticks, time_lines(memory, kMemoryBytes));
      const std::int64_t start_ns = monotonic_ns();
      for (std::size_t offset = 0; offset < kMemoryBytes; offset += kSourceBytes)
        copy_by(streams, static_cast<unsigned char*>(memory) + offset, source.get(), kSourceBytes);
      best_ns[streams] = std::min(best_ns[streams], monotonic_ns() - start_ns);
      if (!streams) near_ticks = std::min(near_ticks, time_lines(memory, kMemoryBytes));
    }
  }
  munmap(memory, kMemoryBytes);
  Found found{static_cast<double>(best_ns[true]) < kWrittenBack * static_cast<double>(best_ns[false])};
  if (far_ticks > kFartherBy * near_ticks) found.far_ticks = (near_ticks + far_ticks) / 2;
  return found;
}

const Found& memory() {
  static const Found found = try_memory();
  return found;
}

}  // namespace

void copy_by_strings(void* to, const void* from, std::size_t bytes) {
#if defined(__x86_64__)
  const std::uintptr_t ahead = (reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from)) % kPage;
  if (ahead > 0 && ahead < kLine) return copy_by_blocks(to, from, bytes);  // that is slow, see copy_plain
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes)::"memory");
#else
  copy_by_blocks(to, from, bytes);
#endif
}

bool memory_prefers_streams() { return memory().streams_win; }

bool lies_in_memory(const void* data, std::size_t bytes) { return time_lines(data, bytes) > memory().far_ticks; }

}  // namespace pycomm::shm
