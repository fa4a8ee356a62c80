// The idea: the host never learns how many elements reach a threshold, so every launch is always queued, over a grid that
// depends on numel alone, and finds in device memory what is left to do.
//
//   sample    one block guesses a threshold from 32 Ki elements, or takes the last call's
//   count     reads all: how many elements of each warp's range reach it; writes flat + residual to the residual
//   collect   reads all: writes the candidates, in order; nothing if the guess was bad, then all elements are candidates
//   digit     three histograms of the candidates find the k-th largest magnitude exactly
//   rank      counts in each warp's range of the candidates what is above it, and what is equal
//   write     writes the chosen ones, in order, and zeros where the residual had them
//
// Each warp has one contiguous range, so a prefix sum over the warps' counts, which the last block to finish forms, tells
// it where to write; what it writes is in ascending order. Bytes moved per element: 8 read, with a residual 12 read and 4
// written, and some 40 for each candidate; where the guess was bad, five times as many are read.
#include "../common/select.h"
#include "launch.h"
#include "topk.h"

namespace pycomm {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kWarp = 32, kStep = 4 * kWarp;  // elements that a warp looks at together
constexpr int kWarpsOfBlock = kThreads / kWarp;
constexpr int kBlocksPerMultiprocessor = 6, kMaxBlocks = 1024, kMaxWarps = kMaxBlocks * kWarpsOfBlock;
constexpr int kSampleThreads = 1024, kSampleEach = 32;

// What the kernels of one call tell each other, in the workspace. Begins as zeros.
struct State {
  std::uint32_t histogram[kRadixRounds][kRadixBins];
  std::uint32_t finished[kRadixRounds + 2];  // blocks, of each kernel that ends with a last one
  std::int32_t guess;
  std::uint32_t is_given;
  Verdict verdict;
  std::uint32_t candidates;  // how many there are
  RadixPrefix prefix;
  std::uint32_t equal;     // of those whose magnitude is the key's, how many are chosen
  std::uint32_t selected;  // chosen in all
};

struct Work {
  TopkJob job;
  std::int32_t* report;
  bool is_reusing;
  std::size_t capacity;
  std::int32_t* indices;  // (capacity,) of the candidates
  float* values;
  std::uint32_t* before;  // (kMaxWarps,) elements of the warps before
  std::uint32_t* equals;  // (kMaxWarps,)
  State* state;
  SamplePlan sample;
};
static_assert(sizeof(State) + 2 * kMaxWarps * sizeof(std::uint32_t) + 64 <= kTopkCounterBytes);

// The sum, bit for bit as x86 has it where that is no number: the first operand that is none, made quiet, or the negative one. A GPU
// knows one NaN alone, and its magnitude would be chosen before those that were there.
__device__ float add_as_cpu(float a, float b) {
  const float sum = a + b;
  if (sum == sum) return sum;
  const std::int32_t quiet = 0x00400000;
  if (a != a) return __int_as_float(__float_as_int(a) | quiet);
  if (b != b) return __int_as_float(__float_as_int(b) | quiet);
  return __int_as_float(static_cast<std::int32_t>(0xFFC00000u));
}

__device__ std::int32_t magnitude(float value) { return __float_as_int(value) & kMagnitude; }

// The range of the elements 0 .. count - 1 that is this warp's: whole steps.
struct Range {
  std::size_t begin, end;
  std::uint32_t warp;
};
__device__ Range range_of_warp(std::size_t count) {
  const std::size_t warps = std::size_t{gridDim.x} * kWarpsOfBlock;
  const std::size_t each = (count + warps * kStep - 1) / (warps * kStep) * kStep;
  const std::size_t warp = blockIdx.x * std::size_t{kWarpsOfBlock} + threadIdx.x / kWarp;
  const std::size_t begin = warp * each < count ? warp * each : count;
  return {begin, begin + each < count ? begin + each : count, static_cast<std::uint32_t>(warp)};
}

struct Four {
  float x[4];
};

// Elements [i, i + 4) of `from`; zeros from `end` on.
__device__ Four load_four(const float* from, std::size_t i, std::size_t end, bool is_aligned) {
  if (is_aligned && i + 4 <= end) {
    const float4 loaded = *reinterpret_cast<const float4*>(from + i);
    return {{loaded.x, loaded.y, loaded.z, loaded.w}};
  }
  Four four = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (i + j < end) four.x[j] = from[i + j];
  }
  return four;
}

__device__ bool is_aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

// The sum of the lanes before this one; `total` becomes that of all.
__device__ std::uint32_t sum_before(std::uint32_t value, std::uint32_t* total) {
  const unsigned lane = threadIdx.x % kWarp;
  std::uint32_t sum = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const std::uint32_t other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= static_cast<unsigned>(step)) sum += other;
  }
  *total = __shfl_sync(kAllLanes, sum, kWarp - 1);
  return sum - value;
}

__device__ std::uint32_t sum_of_warp(std::uint32_t value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// Says to all threads of the block that gets here last that they are it; what the others wrote is then visible.
__device__ bool is_last_block(std::uint32_t* finished) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(finished, 1u) + 1 == gridDim.x;
  __syncthreads();
  if (is_last) __threadfence();
  return is_last;
}

// A counter that other blocks added to, past the L1 cache; or one in the block's own memory.
template <bool is_global>
__device__ std::uint32_t read_counter(const std::uint32_t* counter) {
  if constexpr (is_global) return __ldcg(counter);
  return *counter;
}

// counts[i] becomes the sum of those before it; returns the sum of all, to every thread. One block of kThreads.
__device__ std::uint32_t scan_counts(std::uint32_t* counts, int length) {
  __shared__ std::uint32_t of_warp[kWarpsOfBlock];
  const int each = (length + kThreads - 1) / kThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * each, length), end = min(begin + each, length);
  std::uint32_t sum = 0, of_lanes = 0, total = 0;
  for (int i = begin; i < end; ++i) sum += read_counter<true>(counts + i);
  std::uint32_t before = sum_before(sum, &of_lanes);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = of_lanes;
  __syncthreads();
  for (int warp = 0; warp < kWarpsOfBlock; ++warp) {
    if (warp < static_cast<int>(threadIdx.x) / kWarp) before += of_warp[warp];
    total += of_warp[warp];
  }
  for (int i = begin; i < end; ++i) {
    const std::uint32_t here = read_counter<true>(counts + i);
    counts[i] = before;
    before += here;
  }
  __syncthreads();  // before `of_warp` is used again
  return total;
}

// Takes a digit from a histogram with the whole block: the bin that has the element of this rank.
template <int threads, bool is_global>
__device__ void take_digit(RadixPrefix* prefix, RadixDigit digit, std::size_t rank, const std::uint32_t* histogram) {
  constexpr int kEach = kRadixBins / threads;
  __shared__ std::uint32_t sums[threads];
  std::uint32_t sum = 0;
  for (int j = 0; j < kEach; ++j) sum += read_counter<is_global>(histogram + threadIdx.x * kEach + j);
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    RadixPrefix found = *prefix;
    int group = threads - 1;
    for (; group > 0 && found.above + sums[group] < rank; --group) found.above += sums[group];
    std::int32_t bin = group * kEach + kEach - 1;
    for (; bin > group * kEach; --bin) {
      const std::uint32_t here = read_counter<is_global>(histogram + bin);
      if (found.above + here >= rank) break;
      found.above += here;
    }
    found.append(digit, bin);
    *prefix = found;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kSampleThreads) sample_kernel(const __grid_constant__ Work work) {
  __shared__ std::uint32_t histogram[kRadixBins];
  __shared__ RadixPrefix prefix;
  const TopkJob& job = work.job;
  const std::int32_t given = work.is_reusing ? *work.report : 0;
  if (threadIdx.x == 0) work.state->is_given = given > 0, work.state->guess = given > 0 ? given : 0;
  if (given > 0 || work.sample.rank == 0) return;
  std::int32_t keys[kSampleEach];
#pragma unroll
  for (int j = 0; j < kSampleEach; ++j) {
    const std::size_t i = std::size_t(j) * kSampleThreads + threadIdx.x;
    keys[j] = -1;
    if (i < work.sample.count) {
      const std::size_t place = work.sample.index(i);
      keys[j] = magnitude(job.residual != nullptr ? add_as_cpu(job.flat[place], job.residual[place]) : job.flat[place]);
    }
  }
  if (threadIdx.x == 0) prefix = RadixPrefix{0, 0, 0};
  for (int round = 0; round < kRadixRounds; ++round) {
    const RadixDigit digit = radix_digit(round);
    for (int bin = threadIdx.x; bin < kRadixBins; bin += kSampleThreads) histogram[bin] = 0;
    __syncthreads();
    const RadixPrefix known = prefix;
#pragma unroll
    for (int j = 0; j < kSampleEach; ++j) {
      if (keys[j] >= 0 && known.holds(keys[j])) atomicAdd(&histogram[radix_bin(digit, keys[j])], 1u);
    }
    __syncthreads();
    take_digit<kSampleThreads, false>(&prefix, digit, work.sample.rank, histogram);
  }
  if (threadIdx.x == 0) work.state->guess = prefix.key;
}

template <bool has_residual>
__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ Work work) {
  constexpr int kUnrolled = 4;
  const TopkJob& job = work.job;
  State& state = *work.state;
  const std::int32_t guess = state.guess;
  const bool is_flat_aligned = is_aligned(job.flat), is_left_aligned = is_aligned(job.residual);
  const Range range = range_of_warp(job.numel);
  std::uint32_t found = 0;
  for (std::size_t at = range.begin; at < range.end; at += kUnrolled * kStep) {
    Four loaded[kUnrolled];
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) {
      const std::size_t i = at + u * kStep + 4 * (threadIdx.x % kWarp);
      loaded[u] = load_four(job.flat, i, range.end, is_flat_aligned);
      if constexpr (has_residual) {
        const Four left = load_four(job.residual, i, range.end, is_left_aligned);
#pragma unroll
        for (int j = 0; j < 4; ++j) loaded[u].x[j] = add_as_cpu(loaded[u].x[j], left.x[j]);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) {
      const std::size_t i = at + u * kStep + 4 * (threadIdx.x % kWarp);
#pragma unroll
      for (int j = 0; j < 4; ++j) found += i + j < range.end && magnitude(loaded[u].x[j]) >= guess;
      if constexpr (has_residual) {
        if (is_left_aligned && i + 4 <= range.end) {
          const Four& sum = loaded[u];
          *reinterpret_cast<float4*>(job.residual + i) = make_float4(sum.x[0], sum.x[1], sum.x[2], sum.x[3]);
        } else {
          for (int j = 0; j < 4 && i + j < range.end; ++j) job.residual[i + j] = loaded[u].x[j];
        }
      }
    }
  }
  found = sum_of_warp(found);
  if (threadIdx.x % kWarp == 0) work.before[range.warp] = found;
  if (!is_last_block(&state.finished[0])) return;
  const std::uint32_t total = scan_counts(work.before, static_cast<int>(gridDim.x) * kWarpsOfBlock);
  if (threadIdx.x != 0) return;
  state.verdict = judge_guess(total, job.k, work.capacity, state.is_given != 0, job.accepted);
  state.candidates = state.verdict == Verdict::kLookAgain ? static_cast<std::uint32_t>(job.numel) : total;
}

// What the selection is among: the candidates, or everything.
struct Source {
  const float* values;
  const std::int32_t* indices;  // null: element i is the i-th
  std::size_t count;
};
__device__ Source source_of(const Work& work, bool is_everything) {
  const float* const everything = work.job.residual != nullptr ? work.job.residual : work.job.flat;
  if (is_everything) return {everything, nullptr, work.job.numel};
  return {work.values, work.indices, work.state->candidates};
}

__global__ void __launch_bounds__(kThreads) collect_kernel(const __grid_constant__ Work work) {
  const State& state = *work.state;
  if (state.verdict == Verdict::kLookAgain) return;
  const Source all = source_of(work, true);
  const std::int32_t guess = state.guess;
  const bool is_all_aligned = is_aligned(all.values);
  const Range range = range_of_warp(all.count);
  std::size_t place = work.before[range.warp];
  constexpr int kUnrolled = 4;
  for (std::size_t at = range.begin; at < range.end; at += kUnrolled * kStep) {
    Four loaded[kUnrolled];
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) {
      loaded[u] = load_four(all.values, at + u * kStep + 4 * (threadIdx.x % kWarp), range.end, is_all_aligned);
    }
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) {
      const std::size_t i = at + u * kStep + 4 * (threadIdx.x % kWarp);
      std::uint32_t mask = 0, total = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        mask |= static_cast<std::uint32_t>(i + j < range.end && magnitude(loaded[u].x[j]) >= guess) << j;
      }
      if (__any_sync(kAllLanes, mask != 0) == 0) continue;
      std::size_t mine = place + sum_before(static_cast<std::uint32_t>(__popc(mask)), &total);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if ((mask >> j & 1u) == 0) continue;
        work.indices[mine] = static_cast<std::int32_t>(i + j);
        work.values[mine++] = loaded[u].x[j];
      }
      place += total;
    }
  }
}

template <int round>
__global__ void __launch_bounds__(kThreads) digit_kernel(const __grid_constant__ Work work) {
  __shared__ std::uint32_t histogram[kRadixBins];
  State& state = *work.state;
  if (state.verdict == Verdict::kAccept) return;
  constexpr RadixDigit kDigit = radix_digit(round);
  const Source source = source_of(work, state.verdict == Verdict::kLookAgain);
  const RadixPrefix prefix = state.prefix;
  for (int bin = threadIdx.x; bin < kRadixBins; bin += kThreads) histogram[bin] = 0;
  __syncthreads();
  const std::size_t stride = std::size_t{gridDim.x} * kThreads;
  for (std::size_t i = blockIdx.x * std::size_t{kThreads} + threadIdx.x; i < source.count; i += stride) {
    const std::int32_t key = magnitude(source.values[i]);
    if (prefix.holds(key)) atomicAdd(&histogram[radix_bin(kDigit, key)], 1u);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < kRadixBins; bin += kThreads) {
    if (histogram[bin] != 0) atomicAdd(&state.histogram[round][bin], histogram[bin]);
  }
  if (is_last_block(&state.finished[1 + round])) {
    take_digit<kThreads, true>(&state.prefix, kDigit, work.job.k, state.histogram[round]);
  }
}

// Which of four elements are above the key, and which are equal to it: a bit each.
struct Masks {
  std::uint32_t above, equal;
};
__device__ Masks compare_four(const Source& source, std::size_t i, std::size_t end, std::int32_t key, Four* loaded) {
  *loaded = load_four(source.values, i, end, is_aligned(source.values));
  Masks masks = {0, 0};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::int32_t bits = magnitude(loaded->x[j]);
    masks.above |= static_cast<std::uint32_t>(i + j < end && bits > key) << j;
    masks.equal |= static_cast<std::uint32_t>(i + j < end && bits == key) << j;
  }
  return masks;
}

__global__ void __launch_bounds__(kThreads) rank_kernel(const __grid_constant__ Work work) {
  State& state = *work.state;
  const bool is_accepted = state.verdict == Verdict::kAccept;
  const Source source = source_of(work, state.verdict == Verdict::kLookAgain);
  // What was accepted is chosen whole: its smallest possible magnitude is the guess.
  const std::int32_t key = is_accepted ? state.guess : state.prefix.key;
  const Range range = range_of_warp(source.count);
  std::uint32_t above = 0, equal = 0;
  for (std::size_t at = range.begin; at < range.end; at += kStep) {
    Four loaded;
    const Masks masks = compare_four(source, at + 4 * (threadIdx.x % kWarp), range.end, key, &loaded);
    above += static_cast<std::uint32_t>(__popc(masks.above));
    equal += static_cast<std::uint32_t>(__popc(masks.equal));
  }
  above = sum_of_warp(above), equal = sum_of_warp(equal);
  if (threadIdx.x % kWarp == 0) work.before[range.warp] = above, work.equals[range.warp] = equal;
  if (!is_last_block(&state.finished[1 + kRadixRounds])) return;
  const int warps = static_cast<int>(gridDim.x) * kWarpsOfBlock;
  scan_counts(work.before, warps);
  const std::uint32_t equals = scan_counts(work.equals, warps);
  if (threadIdx.x != 0) return;
  state.equal = is_accepted ? equals : static_cast<std::uint32_t>(work.job.k - state.prefix.above);
  state.selected = is_accepted ? state.candidates : static_cast<std::uint32_t>(work.job.k);
  if (work.report == nullptr) return;
  work.report[0] = key;
  work.report[1] = static_cast<std::int32_t>(state.selected);
  work.report[2] = !is_accepted;
}

__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ Work work) {
  const TopkJob& job = work.job;
  const State& state = *work.state;
  const Source source = source_of(work, state.verdict == Verdict::kLookAgain);
  const std::int32_t key = state.verdict == Verdict::kAccept ? state.guess : state.prefix.key;
  const Range range = range_of_warp(source.count);
  std::uint32_t above = work.before[range.warp], equal = work.equals[range.warp];  // in the elements before
  for (std::size_t at = range.begin; at < range.end; at += kStep) {
    const std::size_t i = at + 4 * (threadIdx.x % kWarp);
    Four loaded;
    const Masks masks = compare_four(source, i, range.end, key, &loaded);
    if (__any_sync(kAllLanes, (masks.above | masks.equal) != 0) == 0) continue;
    std::uint32_t all_above = 0, all_equal = 0;
    std::uint32_t its_above = above + sum_before(static_cast<std::uint32_t>(__popc(masks.above)), &all_above);
    std::uint32_t its_equal = equal + sum_before(static_cast<std::uint32_t>(__popc(masks.equal)), &all_equal);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool is_above = (masks.above >> j & 1u) != 0, is_equal = (masks.equal >> j & 1u) != 0;
      if (is_above || (is_equal && its_equal < state.equal)) {
        const std::uint32_t place = its_above + (its_equal < state.equal ? its_equal : state.equal);
        const std::int32_t index = source.indices != nullptr ? source.indices[i + j] : static_cast<std::int32_t>(i + j);
        job.indices[place] = index;
        job.values[place] = loaded.x[j];
        if (job.residual != nullptr) job.residual[index] = 0.0f;
      }
      its_above += is_above, its_equal += is_equal;
    }
    above += all_above, equal += all_equal;
  }
  const std::size_t stride = std::size_t{gridDim.x} * kThreads;
  for (std::size_t i = state.selected + blockIdx.x * std::size_t{kThreads} + threadIdx.x; i < job.k; i += stride) {
    job.indices[i] = static_cast<std::int32_t>(job.numel - 1);
    job.values[i] = 0.0f;
  }
}

__global__ void __launch_bounds__(kThreads)
    check_kernel(const std::int32_t* indices, std::size_t count, std::size_t numel, std::uint32_t* flag) {
  const std::size_t stride = std::size_t{gridDim.x} * kThreads;
  for (std::size_t i = blockIdx.x * std::size_t{kThreads} + threadIdx.x; i < count; i += stride) {
    if (static_cast<std::uint32_t>(indices[i]) >= numel) atomicOr(flag, 1u);
  }
}

__global__ void __launch_bounds__(kThreads)
    scatter_add_kernel(float* flat, std::size_t numel, const std::int32_t* indices, const float* values,
                       std::size_t count, float factor, const std::uint32_t* flag) {
  const std::size_t stride = std::size_t{gridDim.x} * kThreads;
  const std::size_t first = blockIdx.x * std::size_t{kThreads} + threadIdx.x;
  if (*flag != 0) {
    for (std::size_t i = first; i < numel; i += stride) flat[i] = __int_as_float(0x7FC00000);
    return;
  }
  for (std::size_t i = first; i < count; i += stride) atomicAdd(flat + indices[i], values[i] * factor);
}

}  // namespace

int topk_cuda(const TopkJob& job, std::int32_t* report, bool is_reusing, void* stream) {
  Work work{job, report, is_reusing && report != nullptr, topk_candidates(job.numel, job.k), nullptr, nullptr, nullptr,
            nullptr, nullptr, SamplePlan(job.numel, job.k, std::size_t{kSampleThreads} * kSampleEach)};
  work.state = reinterpret_cast<State*>((reinterpret_cast<std::uintptr_t>(job.workspace) + 15) / 16 * 16);
  work.before = reinterpret_cast<std::uint32_t*>(work.state + 1);
  work.equals = work.before + kMaxWarps;
  work.values = reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(work.equals + kMaxWarps) + 15) / 16 * 16);
  work.indices = reinterpret_cast<std::int32_t*>(work.values + work.capacity);
  unsigned blocks = 0;
  cudaError_t error = count_blocks((job.numel + 3) / 4, kBlocksPerMultiprocessor, &blocks);
  if (error != cudaSuccess) return error;
  blocks = std::min<unsigned>(blocks, kMaxBlocks);
  error = cudaMemsetAsync(work.state, 0, sizeof(State), static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) error = launch_kernel(&sample_kernel, 1, kSampleThreads, stream, work);
  const auto count = job.residual != nullptr ? &count_kernel<true> : &count_kernel<false>;
  for (const auto kernel : {count, &collect_kernel, &digit_kernel<0>, &digit_kernel<1>, &digit_kernel<2>, &rank_kernel,
                            &write_kernel}) {
    if (error == cudaSuccess) error = launch_kernel(kernel, blocks, kThreads, stream, work);
  }
  return error;
}

int scatter_add_cuda(float* flat, std::size_t numel, const std::int32_t* indices, const float* values, std::size_t count,
                     float factor, std::uint32_t* flag, void* stream) {
  if (count == 0) return cudaSuccess;
  unsigned blocks = 0;
  cudaError_t error = count_blocks(count, 8, &blocks);
  if (error == cudaSuccess) error = cudaMemsetAsync(flag, 0, sizeof(*flag), static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) error = launch_kernel(&check_kernel, blocks, kThreads, stream, indices, count, numel, flag);
  const std::uint32_t* const checked = flag;
  if (error == cudaSuccess) {
    error = launch_kernel(&scatter_add_kernel, blocks, kThreads, stream, flat, numel, indices, values, count, factor,
                          checked);
  }
  return error;
}

}  // namespace pycomm
