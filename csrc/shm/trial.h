// Which of two ways to do the same takes less time on this machine, at this moment. For the files of collectives.
#pragma once

#include <algorithm>

#include "group.h"

namespace pycomm::shm {

inline constexpr int kTrials = 6, kRepeats = 2;

template <class Stage>
void Group::walk_ring(const char* verb, std::size_t bytes, Stage stage) {
  for (std::size_t walked = 0; walked < at_.ring_bytes; walked += bytes) {
    stage();
    sync(verb);  // a root that only fills would run away from the others
  }
}

template <class One, class Other>
Group::Way Group::is_faster(const char* verb, One one, Other other, double share) {
  std::int64_t best_ns[] = {INT64_MAX, INT64_MAX};
  for (int trial = 0; trial < kTrials; ++trial) {
    for (const bool is_other : {false, true}) {
      const std::int64_t start_ns = monotonic_ns();
      for (int i = 0; i < kRepeats; ++i)
        if (!(is_other ? other() : one())) return std::nullopt;
      sync(verb);
      best_ns[is_other] = std::min(best_ns[is_other], monotonic_ns() - start_ns);
    }
  }
  Ping& mine = ping(rank_);
  for (const bool is_other : {false, true}) mine.exchange_ns[is_other] = static_cast<std::uint32_t>(best_ns[is_other]);
  sync(verb);
  std::uint64_t one_ns = 0, other_ns = 0;  // of all ranks together
  for (int r = 0; r < ranks_; ++r) {
    one_ns += ping(r).exchange_ns[false];
    other_ns += ping(r).exchange_ns[true];
  }
  sync(verb);  // nobody measures anything else before all have read
  return static_cast<double>(other_ns) < share * static_cast<double>(one_ns);
}

}  // namespace pycomm::shm
