// The trial that tells how to read what no cache holds; [Note: reading ahead].
#include "../read_ahead.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>

#include "../forget.h"
#include "isa.h"

namespace pycomm {
namespace {

constexpr std::size_t kBytes = 8u << 20;  // of half of it the memory's buffers hide the difference
constexpr int kTries = 4;          // the best counts: another process may have had the core, or the memory, during the others
constexpr double kClearly = 0.95;  // where both take as long, lines that a cache holds after all are sooner read in their order

using Clock = std::chrono::steady_clock;

// By what pack() does, the plainest of the loops that read long input: a copy of what no cache holds, past the caches.
Clock::duration time_copy(char* to, char* from, Run run) {
  forget(from, kBytes);
  const Clock::time_point start = Clock::now();
  active_codecs().convert[0][0](to, from, kBytes / sizeof(float), 1.0f, run);
  return Clock::now() - start;
}

bool try_pages() {
  void* const memory = mmap(nullptr, 2 * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) return false;
  char* const from = static_cast<char*>(memory);
  Clock::duration in_order = Clock::duration::max(), by_pages = Clock::duration::max();
  for (int i = 0; i < kTries; ++i) {
    in_order = std::min(in_order, time_copy(from + kBytes, from, Run::kStreamed));
    by_pages = std::min(by_pages, time_copy(from + kBytes, from, Run::kByPages));
  }
  munmap(memory, 2 * kBytes);
  return by_pages < kClearly * in_order;
}

}  // namespace

bool reads_by_pages(std::size_t bytes) { return bytes >= kLongBytes && pages_win(); }

bool pages_win() {
  static const bool win = try_pages();
  return win;
}

}  // namespace pycomm
