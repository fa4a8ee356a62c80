// topk(): a guess, one pass that collects what reaches it, and an exact selection among these few.
//
// The guess is the caller's, or comes from a sample: every n-th cache line, at most 256 Ki elements, of which a rank a
// few standard deviations beyond the expected one is taken; so the candidates are k and a bit more. Where many elements
// are equal (a gradient that is mostly zeros), the guess may be their magnitude; a second pass then collects what is above
// it, and if that is fewer than k, the guess was the exact threshold. Whatever the guess, the answer is the same: if it
// was too high or far too low, the selection goes over the whole input.
#include "../topk.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "../common/select.h"
#include "../copy.h"
#include "isa.h"

namespace pycomm {
namespace {

constexpr std::size_t kAhead = 64;  // so many scattered elements are asked for, whose places the hardware cannot foretell

std::int32_t magnitude_at(const float* values, std::size_t i) {
  std::int32_t bits;
  std::memcpy(&bits, values + i, sizeof(bits));
  return bits & kMagnitude;
}

std::int32_t least_of(const float* values, std::size_t count) {
  std::int32_t least = kMagnitude;
  for (std::size_t i = 0; i < count; ++i) least = std::min(least, magnitude_at(values, i));
  return least;
}

// The rank-th largest of `count` magnitudes, 1 <= rank <= count, and how many are larger.
struct Ranked {
  std::int32_t key;
  std::size_t above;
};

// A histogram of what lies between the smallest and the largest, then one of what lies in the bin that has the rank, until that has
// few, which are sorted. So magnitudes that are near each other, as those of candidates are, spread over all bins (neighbours that are
// counted in the same one would wait for each other), and as a rule one histogram does.
Ranked select_rank(const float* values, std::size_t count, std::size_t rank) {
  constexpr int kBits = 11;
  constexpr std::size_t kFew = 64;
  std::int32_t least = kMagnitude, most = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t magnitude = magnitude_at(values, i);
    least = std::min(least, magnitude), most = std::max(most, magnitude);
  }
  std::size_t above = 0, inside = count;
  auto span = static_cast<std::uint32_t>(most - least);
  const auto for_inside = [&](auto body) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto place = static_cast<std::uint32_t>(magnitude_at(values, i) - least);
      if (place <= span) body(i, place);  // all of them, or hardly any
    }
  };
  while (inside > kFew && span > 0) {
    int shift = 0;
    while (span >> shift >> kBits != 0) ++shift;
    std::uint32_t histogram[2][1 << kBits] = {};  // two, for neighbours that are equal
    for_inside([&](std::size_t i, std::uint32_t place) { ++histogram[i & 1][place >> shift]; });
    std::uint32_t bin = span >> shift;
    for (;; --bin) {
      inside = std::size_t{histogram[0][bin]} + histogram[1][bin];
      if (above + inside >= rank) break;
      above += inside;
    }
    least += static_cast<std::int32_t>(bin << shift);
    span = std::min(span - (bin << shift), (1u << shift) - 1);
  }
  if (span == 0) return {least, above};
  std::uint32_t few[kFew] = {};
  std::size_t found = 0;
  for_inside([&](std::size_t, std::uint32_t place) { few[found++] = place; });
  std::sort(few, few + found, std::greater<>());
  const std::uint32_t place = few[rank - above - 1];
  above += static_cast<std::size_t>(std::find(few, few + found, place) - few);
  return {least + static_cast<std::int32_t>(place), above};
}

// A magnitude that with near certainty at least k elements reach, but not many more.
std::int32_t guess_threshold(const float* flat, const float* residual, std::size_t numel, std::size_t k, float* sample) {
  const SamplePlan plan(numel, k, std::min(kTopkSample, std::max<std::size_t>(8 * 1024, numel / 128)));
  if (plan.rank == 0) return 0;
  for (std::size_t i = 0; i < plan.count; i += SamplePlan::kLine) {
    const std::size_t first = plan.index(i);
    for (std::size_t j = 0; j < SamplePlan::kLine; ++j) {
      sample[i + j] = residual ? flat[first + j] + residual[first + j] : flat[first + j];
    }
  }
  return select_rank(sample, plan.count, plan.rank).key;
}

// What becomes of the first `written` slots, which are: the others say nothing, and what is sent leaves no residual.
void finish(const TopkJob& job, std::size_t written) {
  for (std::size_t i = written; i < job.k; ++i) {
    job.indices[i] = static_cast<std::int32_t>(job.numel - 1);
    job.values[i] = 0.0f;
  }
  if (job.residual == nullptr) return;
  for (std::size_t i = 0; i < written; ++i) {
    __builtin_prefetch(job.residual + job.indices[std::min(i + kAhead, written - 1)], 1);
    job.residual[job.indices[i]] = 0.0f;
  }
}

// Writes all of the `count` candidates, at most k.
void write_all(const TopkJob& job, const CollectPass& pass, std::size_t count) {
  copy_plain(job.indices, pass.indices, count * sizeof(*job.indices));
  copy_plain(job.values, pass.values, count * sizeof(*job.values));
  finish(job, count);
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
  finish(job, written);
}

// Writes the `count` candidates, all that are above the key, and of the equal ones the first k - count, by index.
void write_tied(const TopkJob& job, const CollectPass& above, std::size_t count, std::int32_t key) {
  std::size_t written = 0, next = 0;
  const auto write = [&](std::int32_t index, float value) {
    job.indices[written] = index;
    job.values[written++] = value;
  };
  for (std::size_t i = 0, equal = job.k - count; equal > 0; ++i) {
    if (next < count && above.indices[next] == static_cast<std::int32_t>(i)) {
      write(above.indices[next], above.values[next]);
      ++next;
    } else if (magnitude_at(above.flat, i) == key) {
      write(static_cast<std::int32_t>(i), above.flat[i]);
      --equal;
    }
  }
  for (; next < count; ++next) write(above.indices[next], above.values[next]);
  finish(job, written);
}

}  // namespace

TopkResult topk(const TopkJob& job) {
  const std::size_t capacity = topk_candidates(job.numel, job.k);
  CollectPass pass{};
  pass.flat = job.flat, pass.residual = job.residual, pass.numel = job.numel, pass.capacity = capacity;
  pass.indices = static_cast<std::int32_t*>(job.workspace);
  pass.values = reinterpret_cast<float*>(pass.indices + capacity);
  float* const sample = pass.values + capacity;
  const auto take_k_of = [&](std::size_t found) {
    if (found == job.k) {
      write_all(job, pass, found);
      return TopkResult{least_of(pass.values, found), found, true};
    }
    const Ranked exact = select_rank(pass.values, found, job.k);
    write_chosen(job, pass.indices, pass.values, found, exact.key, job.k - exact.above);
    return TopkResult{exact.key, job.k, true};
  };
  std::size_t found = 0;
  for (std::int32_t guess : {job.guess, std::int32_t{0}}) {
    const bool is_given = guess > 0;
    if (!is_given) guess = guess_threshold(pass.flat, pass.residual, job.numel, job.k, sample);
    pass.least = guess;
    found = active_codecs().collect(pass);
    const Verdict verdict = judge_guess(found, job.k, capacity, is_given, job.accepted);
    if (verdict == Verdict::kAmongThem) return take_k_of(found);
    if (verdict == Verdict::kAccept) {
      write_all(job, pass, found);
      return {guess, found, false};
    }
    if (job.residual != nullptr) pass.flat = job.residual, pass.residual = nullptr;  // which holds the sum now
    if (!is_given) break;
  }
  if (found > capacity) {
    const std::int32_t key = pass.least++;
    const std::size_t above = key == kMagnitude ? 0 : active_codecs().collect(pass);
    if (above < job.k) {
      write_tied(job, pass, above, key);
      return {key, job.k, true};
    }
    if (above <= capacity) return take_k_of(above);
  }
  const Ranked exact = select_rank(pass.flat, job.numel, job.k);
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

std::size_t find_disorder(const SparsePart& part, std::size_t numel) {
  const std::size_t bad = find_bad_index(part.indices, part.count, numel);
  bool is_ordered = true;
  for (std::size_t i = 1; i < bad; ++i) is_ordered &= part.indices[i - 1] <= part.indices[i];
  if (is_ordered) return bad;
  std::size_t i = 1;
  while (part.indices[i - 1] <= part.indices[i]) ++i;
  return i;
}

// Chunk by chunk, in the L1 cache: so the zeros are written there, and memory sees each line once.
void scatter_sum(float* flat, std::size_t begin, std::size_t end, SparsePart* parts, std::size_t num_parts,
                 bool is_streamed) {
  constexpr std::size_t kStep = 4096;
  alignas(64) float chunk[kStep];
  const auto skip = [](SparsePart& part, std::size_t count) {
    part.indices += count, part.values += count, part.count -= count;
  };
  for (std::size_t p = 0; p < num_parts; ++p) {
    const auto* const from = std::lower_bound(parts[p].indices, parts[p].indices + parts[p].count, static_cast<std::int64_t>(begin));
    skip(parts[p], static_cast<std::size_t>(from - parts[p].indices));
  }
  for (std::size_t at = begin; at < end; at += kStep) {
    const std::size_t count = std::min(kStep, end - at);
    std::memset(chunk, 0, 4 * count);
    for (std::size_t p = 0; p < num_parts; ++p) {
      std::size_t i = 0;
      for (; i < parts[p].count; ++i) {
        const std::size_t place = static_cast<std::size_t>(parts[p].indices[i]) - at;
        if (place >= count) break;
        chunk[place] += parts[p].values[i];
      }
      skip(parts[p], i);
    }
    if (is_streamed) {
      active_isa().copy_streamed(reinterpret_cast<char*>(flat + at), reinterpret_cast<const char*>(chunk), 4 * count);
    } else {
      std::memcpy(flat + at, chunk, 4 * count);
    }
  }
  if (is_streamed) store_fence();
}

void scatter_add(float* flat, const std::int32_t* indices, const float* values, std::size_t count, float factor) {
  for (std::size_t i = 0; i < count; ++i) {
    __builtin_prefetch(flat + indices[std::min(i + kAhead, count - 1)], 1);
    flat[indices[i]] += values[i] * factor;
  }
}

}  // namespace pycomm
