// Which of a few ways to do what is done again and again usually takes less time on this machine, at this moment.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

namespace pycomm::shm {

// Of some thousands, or hundreds of long ones, the first go the one way, the next another, all once more, and the rest as usually took less. What went before disturbs
// what comes next, until every buffer that is used in turn has gone the same way (whose cache holds which lines: two ranks on Zen 5 that exchange
// 256 KiB from 16 buffers take 35 to 54 us for the first offers, 21 for later ones). So nothing is timed the first time, and then only the second half.
template <unsigned ways>
class FewWays {
 public:
  // The way that the next goes, where `each` is tried so often at a time; that is always the same.
  unsigned choose(unsigned each = 64) {
    const unsigned number = chosen_++ % (kRounds * each);
    is_timed_ = number >= ways * each && number < 2 * ways * each && number % each >= each / 2;
    if (number >= 2 * ways * each) return static_cast<unsigned>(std::min_element(usual_ns_, usual_ns_ + ways) - usual_ns_);
    tried_ = number / each % ways;
    if (number % each == 0) {
      times_ns_.clear();
      times_ns_.reserve(each);  // for `took`, which destructors call
      usual_ns_[tried_] = std::numeric_limits<double>::max();  // where none comes to its end
    }
    return tried_;
  }
  // Whether to say what it took, which went that way.
  bool is_timed() const { return is_timed_; }
  void took(unsigned way, double ns) {
    if (way != tried_) return;  // too late
    times_ns_.push_back(ns);
    const auto middle = times_ns_.begin() + static_cast<std::ptrdiff_t>(times_ns_.size() / 2);
    std::nth_element(times_ns_.begin(), middle, times_ns_.end());
    usual_ns_[way] = *middle;
  }

 private:
  static constexpr unsigned kRounds = 64;  // of which the ways are tried in the first

  unsigned chosen_ = 0, tried_ = 0;
  bool is_timed_ = false;
  std::vector<double> times_ns_;  // of the way that was tried last
  double usual_ns_[ways] = {};
};

}  // namespace pycomm::shm
