// The time, for every native layer.
#pragma once

#include <time.h>

#include <cstdint>

namespace pycomm {

inline std::int64_t clock_ns(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

inline std::int64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }

}  // namespace pycomm
