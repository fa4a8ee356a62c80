// topk(): a guess, one pass that collects what reaches it, and an exact selection among these few.
//
// The guess is the caller's, or comes from a sample: every n-th cache line, at most 256 Ki elements, of which a rank a
// few standard deviations beyond the expected one is taken; so the candidates are k and a bit more. Whatever the guess,
// the answer is the same: if it was too high or far too low, a radix selection over the whole input (three histograms, of
// 11, 10 and 10 bits) finds the exact threshold.
#include "../topk.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"

namespace pycomm {
namespace {

constexpr std::int32_t kMagnitude = 0x7FFFFFFF;

std::int32_t magnitude_at(const float* values, std::size_t i) {
  std::int32_t bits;
  std::memcpy(&bits, values + i, sizeof(bits));
  return bits & kMagnitude;
}

struct Threshold {
  std::int32_t key;   // the rank-th largest magnitude
  std::size_t above;  // elements that are larger
};

// The rank-th largest of `count` magnitudes, 1 <= rank <= count.
Threshold select_rank(const float* values, std::size_t count, std::size_t rank) {
  struct Digit {
    int shift, bits;
  };
  constexpr Digit kDigits[] = {{20, 11}, {10, 10}, {0, 10}};
  Threshold found{0, 0};
  std::int32_t known = 0;  // the bits of the key that are found already
  for (const Digit digit : kDigits) {
    std::uint32_t histogram[2][1 << 11] = {};  // two, so that equal neighbours do not wait for each other
    const std::int32_t mask = (1 << digit.bits) - 1;
    for (std::size_t i = 0; i < count; ++i) {
      const std::int32_t key = magnitude_at(values, i);
      if ((key & known) == found.key) ++histogram[i & 1][key >> digit.shift & mask];
    }
    std::int32_t bin = mask;
    for (; bin > 0; --bin) {
      const std::size_t here = std::size_t{histogram[0][bin]} + histogram[1][bin];
      if (found.above + here >= rank) break;
      found.above += here;
    }
    found.key |= bin << digit.shift;
    known |= mask << digit.shift;
  }
  return found;
}

// A magnitude that with near certainty at least k elements reach, but not many more.
std::int32_t guess_threshold(const float* flat, const float* residual, std::size_t numel, std::size_t k, float* sample) {
  constexpr std::size_t kLine = 16;
  const std::size_t wanted = std::min(kTopkSample, std::max<std::size_t>(16 * 1024, numel / 64));
  const std::size_t stride = std::max<std::size_t>(1, numel / wanted) * kLine;
  std::size_t count = 0;
  for (std::size_t i = 0; i + kLine <= numel && count + kLine <= kTopkSample; i += stride) {
    for (std::size_t j = i; j < i + kLine; ++j) sample[count++] = residual ? flat[j] + residual[j] : flat[j];
  }
  if (count == 0) return 0;
  const double hits = static_cast<double>(k) * static_cast<double>(count) / static_cast<double>(numel);
  // Elements of one line are alike, so the deviation is taken as larger than that of independent draws.
  const double rank = hits + 6 * std::sqrt(hits) + 8;
  if (rank >= static_cast<double>(count)) return 0;
  return select_rank(sample, count, static_cast<std::size_t>(rank)).key;
}

// Writes those of the candidates that are chosen: above the key, and of the equal ones the first `equal`.
void write_chosen(const TopkJob& job, const std::int32_t* indices, const float* values, std::size_t count,
                  std::int32_t key, std::size_t equal) {
  std::size_t written = 0;
  for (std::size_t i = 0; i < count && written < job.k; ++i) {
    const std::int32_t magnitude = magnitude_at(values, i);
    if (magnitude < key || (magnitude == key && equal == 0)) continue;
    if (magnitude == key) --equal;
    job.indices[written] = indices != nullptr ? indices[i] : static_cast<std::int32_t>(i);
    job.values[written++] = values[i];
  }
  for (std::size_t i = written; i < job.k; ++i) {
    job.indices[i] = static_cast<std::int32_t>(job.numel - 1);
    job.values[i] = 0.0f;
  }
  if (job.residual == nullptr) return;
  for (std::size_t i = 0; i < written; ++i) job.residual[job.indices[i]] = 0.0f;
}

}  // namespace

TopkResult topk(const TopkJob& job) {
  const std::size_t capacity = topk_candidates(job.numel, job.k);
  CollectPass pass{};
  pass.flat = job.flat, pass.residual = job.residual, pass.numel = job.numel, pass.capacity = capacity;
  pass.indices = static_cast<std::int32_t*>(job.workspace);
  pass.values = reinterpret_cast<float*>(pass.indices + capacity);
  float* const sample = pass.values + capacity;
  for (std::int32_t guess : {job.guess, std::int32_t{0}}) {
    const bool is_given = guess > 0;
    if (!is_given) guess = guess_threshold(pass.flat, pass.residual, job.numel, job.k, sample);
    pass.least = guess;
    const std::size_t found = active_codecs().collect(pass);
    if (found <= capacity && found >= job.k) {
      const Threshold exact = select_rank(pass.values, found, job.k);
      write_chosen(job, pass.indices, pass.values, found, exact.key, job.k - exact.above);
      return {exact.key, job.k, true};
    }
    if (is_given && found < job.k && found >= job.accepted) {
      write_chosen(job, pass.indices, pass.values, found, guess, found);
      return {guess, found, false};
    }
    if (job.residual != nullptr) pass.flat = job.residual, pass.residual = nullptr;  // which holds the sum now
    if (!is_given) break;
  }
  const Threshold exact = select_rank(pass.flat, job.numel, job.k);
  write_chosen(job, nullptr, pass.flat, job.numel, exact.key, job.k - exact.above);
  return {exact.key, job.k, true};
}

std::size_t find_bad_index(const std::int32_t* indices, std::size_t count, std::size_t numel) {
  constexpr std::size_t kStep = 256;
  for (std::size_t i = 0; i < count; i += kStep) {
    const std::size_t end = std::min(count, i + kStep);
    bool is_bad = false;
    for (std::size_t j = i; j < end; ++j) is_bad |= static_cast<std::uint32_t>(indices[j]) >= numel;
    if (!is_bad) continue;
    while (static_cast<std::uint32_t>(indices[i]) < numel) ++i;
    return i;
  }
  return count;
}

void scatter_add(float* flat, const std::int32_t* indices, const float* values, std::size_t count, float factor) {
  for (std::size_t i = 0; i < count; ++i) flat[indices[i]] += values[i] * factor;
}

}  // namespace pycomm
