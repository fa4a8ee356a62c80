// The trial that tells how to read what no cache holds; [Note: reading ahead].
#include "../read_ahead.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdint>

#include "../forget.h"
#include "isa.h"

namespace pycomm {
namespace {

constexpr std::size_t kBytes = 4u << 20;
constexpr int kTries = 4;          // the best counts: another process may have had the core, or the memory, during the others
constexpr double kClearly = 0.95;  // where both take as long, lines that a cache holds after all are sooner read in their order

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

// By what pack() does, the plainest of the loops that read long input: a copy of what no cache holds, past the caches.
std::int64_t time_copy(char* to, char* from, Run run) {
  forget(from, kBytes);
  const std::int64_t start_ns = now_ns();
  active_codecs().convert[0][0](to, from, kBytes / sizeof(float), 1.0f, run);
  return now_ns() - start_ns;
}

bool try_pages() {
  void* const memory = mmap(nullptr, 2 * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) return false;
  char* const from = static_cast<char*>(memory);
  std::int64_t in_order_ns = INT64_MAX, by_pages_ns = INT64_MAX;
  for (int i = 0; i < kTries; ++i) {
    in_order_ns = std::min(in_order_ns, time_copy(from + kBytes, from, Run::kStreamed));
    by_pages_ns = std::min(by_pages_ns, time_copy(from + kBytes, from, Run::kByPages));
  }
  munmap(memory, 2 * kBytes);
  return static_cast<double>(by_pages_ns) < kClearly * static_cast<double>(in_order_ns);
}

}  // namespace

bool reads_by_pages(std::size_t bytes) { return bytes >= kLongBytes && pages_win(); }

bool pages_win() {
  static const bool win = try_pages();
  return win;
}

}  // namespace pycomm
