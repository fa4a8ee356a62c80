// Which of a few ways to do what is done again and again usually takes less time on this machine, at this moment.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "wait.h"

namespace pycomm::shm {

// Of some thousands, or hundreds of long ones, the first go the one way, the next another, all once more, and the rest as usually took less. What went before disturbs
// what comes next, until every buffer that is used in turn has gone the same way (whose cache holds which lines: two ranks on Zen 5 that exchange
// 256 KiB from 16 buffers take 35 to 54 us for the first offers, 21 for later ones). So nothing is timed the first time, and then only the second half.
template <unsigned ways>
class FewWays {
 public:
  static constexpr unsigned kAtATime = 64;

  // The way that the next goes, where `each` is tried so often at a time; that is always the same.
  unsigned choose(unsigned each = kAtATime) {
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

// What goes the way that is next: takes its time, from `begin` to the end of its scope.
template <unsigned ways>
class Attempt {
 public:
  Attempt() = default;  // of nothing
  // Of `bytes`, where each way is tried so often at a time.
  Attempt(FewWays<ways>& few_ways, std::size_t bytes, unsigned each = FewWays<ways>::kAtATime)
      : way_(few_ways.choose(each)), ways_(few_ways.is_timed() ? &few_ways : nullptr), bytes_(bytes) {}
  ~Attempt() {
    if (start_ns_ > 0) ways_->took(way_, static_cast<double>(monotonic_ns() - start_ns_) / static_cast<double>(bytes_));
  }
  Attempt(Attempt&& other) : way_(other.way_), ways_(other.ways_), bytes_(other.bytes_), start_ns_(std::exchange(other.start_ns_, 0)) {}
  Attempt& operator=(Attempt&&) = delete;

  unsigned way() const { return way_; }
  // From now on nothing is waited for but what takes its time.
  void begin() {
    if (ways_ != nullptr && start_ns_ == 0) start_ns_ = monotonic_ns();
  }

 private:
  const unsigned way_ = 0;
  FewWays<ways>* const ways_ = nullptr;  // to tell of what it took
  const std::size_t bytes_ = 0;
  std::int64_t start_ns_ = 0;
};

}  // namespace pycomm::shm
