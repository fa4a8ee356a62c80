// Which of two ways to do what is done again and again usually takes less time on this machine, at this moment.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

namespace pycomm::shm {

// Of some thousands the first go the one way, the next the other, both once more, and the rest as usually took less. What went before disturbs
// what comes next, until every buffer that is used in turn has gone the same way (whose cache holds which lines: two ranks on Zen 5 that exchange
// 256 KiB from 16 buffers take 35 to 54 us for the first offers, 21 for later ones). So nothing is timed the first time, and then only the second half.
class TwoWays {
 public:
  // Whether the next goes the other way.
  bool choose() {
    const unsigned number = chosen_++ % kTriedEvery;
    is_timed_ = number >= 2 * kTriedEach && number < 4 * kTriedEach && number % kTriedEach >= kTriedEach / 2;
    if (number >= 4 * kTriedEach) return usual_ns_[true] < usual_ns_[false];
    tried_ = number / kTriedEach % 2 != 0;
    if (number % kTriedEach == 0) {
      times_ns_.clear();
      usual_ns_[tried_] = std::numeric_limits<double>::max();  // where none comes to its end
    }
    return tried_;
  }
  // Whether to say what it took, which went that way.
  bool is_timed() const { return is_timed_; }
  void took(bool way, double ns) {
    if (way != tried_) return;  // too late
    times_ns_.push_back(ns);
    const auto middle = times_ns_.begin() + static_cast<std::ptrdiff_t>(times_ns_.size() / 2);
    std::nth_element(times_ns_.begin(), middle, times_ns_.end());
    usual_ns_[way] = *middle;
  }

 private:
  static constexpr unsigned kTriedEvery = 4096, kTriedEach = 64;

  unsigned chosen_ = 0;
  bool tried_ = false, is_timed_ = false;
  std::vector<double> times_ns_;  // of the way that was tried last
  double usual_ns_[2] = {};
};

}  // namespace pycomm::shm
