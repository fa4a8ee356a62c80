// How the k largest magnitudes are found: the order of elements, the sample that guesses the threshold, and what follows from
// how many elements reach the guess. CPU and CUDA share it.
#pragma once

#include <cmath>

#include "portable.h"

namespace pycomm {

// Elements are ordered by these bits of theirs, read as an integer: NaN > infinity > all else.
inline constexpr std::int32_t kMagnitude = 0x7FFFFFFF;

// Which elements are looked at for a guess: every n-th cache line. `rank`, counted in the sample, is where the guess is
// taken, so that with near certainty at least k elements reach it, but not many more; 0: no guess, everything reaches it.
struct SamplePlan {
  static constexpr std::size_t kLine = 16;  // elements
  std::size_t stride, count, rank;

  SamplePlan(std::size_t numel, std::size_t k, std::size_t wanted) : stride(kLine), count(0), rank(0) {
    if (numel < kLine) return;
    wanted = wanted / kLine * kLine;
    if (numel > wanted) stride = (numel / wanted | 1) * kLine;  // odd: of a power of two of columns all are sampled, not the same few
    const std::size_t lines = (numel - kLine) / stride + 1;
    count = lines * kLine < wanted ? lines * kLine : wanted;
    const double hits = static_cast<double>(k) * static_cast<double>(count) / static_cast<double>(numel);
    // Elements of one line are alike, so the deviation is taken as larger than that of independent draws.
    const double place = hits + 6 * std::sqrt(hits) + 8;
    if (place < static_cast<double>(count)) rank = static_cast<std::size_t>(place);
  }

  // The element that is the i-th of the sample, i < count.
  PYCOMM_HD std::size_t index(std::size_t i) const { return i / kLine * stride + i % kLine; }
};

// What a pass that found `found` elements at or above a guess allows; there is room for `capacity` of them.
enum class Verdict : std::int32_t {
  kAmongThem,  // the k largest are among them
  kAccept,     // they are fewer than k, but enough: they are chosen
  kLookAgain,  // the guess was bad: all elements have to be looked at
};

PYCOMM_HD Verdict judge_guess(std::size_t found, std::size_t k, std::size_t capacity, bool is_given, std::size_t accepted) {
  if (found >= k && found <= capacity) return Verdict::kAmongThem;
  return is_given && found < k && found >= accepted ? Verdict::kAccept : Verdict::kLookAgain;
}

}  // namespace pycomm
