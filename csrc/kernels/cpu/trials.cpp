// What is tried on the machine at hand: see [Note: reading ahead] and [Note: writing past the caches].

#include <sys/mman.h>

#include <algorithm>
#include <chrono>

#include "../forget.h"
#include "../read_ahead.h"
#include "../streams.h"
#include "isa.h"

namespace pycomm {
namespace {

constexpr int kTries = 4;          // the best counts: another process may have had the core, or the memory, during the others
constexpr double kClearly = 0.95;  // where both take as long, lines that a cache holds after all are sooner read in their order

using Clock = std::chrono::steady_clock;

// `bytes` to be copied to as many behind them.
class Copy {
 public:
  explicit Copy(std::size_t bytes) : bytes_(bytes) {
    void* const memory = mmap(nullptr, 2 * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory != MAP_FAILED) from_ = static_cast<char*>(memory);
  }
  ~Copy() {
    if (from_ != nullptr) munmap(from_, 2 * bytes_);
  }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  bool is_possible() const { return from_ != nullptr; }
  void forget_input() const { forget(from_, bytes_); }
  Clock::duration time(Run run) const {
    const Clock::time_point start = Clock::now();
    active_codecs().convert[0][0](from_ + bytes_, from_, bytes_ / sizeof(float), 1.0f, run);
    return Clock::now() - start;
  }

 private:
  const std::size_t bytes_;
  char* from_ = nullptr;
};

bool try_pages() {
  const Copy copy(std::size_t{8} << 20);  // of half of it buffers in the memory hide the difference
  if (!copy.is_possible()) return false;
  Clock::duration best[2] = {Clock::duration::max(), Clock::duration::max()};
  for (int i = 0; i < 2 * kTries; ++i) {
    copy.forget_input();
    best[i % 2] = std::min(best[i % 2], copy.time(i % 2 == 0 ? Run::kStreamed : Run::kByPages));
  }
  return best[1] < kClearly * best[0];
}

// Whether what is copied again and again is copied faster past the caches.
bool try_streams(std::size_t bytes) {
  const Copy copy(bytes);
  if (!copy.is_possible()) return false;
  Clock::duration best[2] = {Clock::duration::max(), Clock::duration::max()};
  for (int i = 0; i < 4 * kTries; ++i) {
    const int way = i / kTries % 2;  // one after another: each finds the caches as its like leaves them
    best[way] = std::min(best[way], copy.time(way == 0 ? Run::kCached : Run::kStreamed));
  }
  return best[1] < kClearly * best[0];
}

constexpr std::size_t kLeastStreamed = std::size_t{8} << 20;

std::size_t find_streamed_bytes() {
  std::size_t bytes = kLeastStreamed;
  while (bytes < kLongBytes && !try_streams(bytes / 2)) bytes *= 2;
  return bytes;
}

}  // namespace

bool reads_by_pages(std::size_t bytes) { return bytes >= kLongBytes && pages_win(); }

bool pages_win() {
  static const bool win = try_pages();
  return win;
}

bool streams(std::size_t bytes) {
  if (bytes < kLeastStreamed) return false;
  static const std::size_t streamed_bytes = find_streamed_bytes();
  return bytes >= streamed_bytes;
}

}  // namespace pycomm
