// The idea: the host never learns how many elements reach a threshold, so every launch is always queued, over a grid that
// depends on numel alone, and finds in device memory what is left to do.
//
//   sample    guesses a threshold from 32 Ki elements, or takes the last call's
//   collect   reads all, once: writes flat + residual to the residual, and the candidates, those that reach the guess
//   digit     three histograms of the candidates find the k-th largest magnitude exactly; of all elements if the guess was bad
//   rank      counts for each tile how many of its candidates are above it, and how many equal
//   write     writes the chosen ones, in order, and zeros where the residual had them
//
// Order costs a second look only at the candidates: a block collects a tile, kTopkTile elements, and appends its candidates,
// in order, at once, wherever other blocks have got to meanwhile; the tile remembers where. Sums over the tiles of what `rank` counted say
// where the chosen ones go. Bytes moved per element: 4 read, with a residual 8 read and 4 written, and some 40 for each
// candidate; where the guess was bad, six times as many are read.
#include "block.h"
#include "elements.h"
#include "launch.h"
#include "radix.h"
#include "topk.h"

namespace pycomm {
namespace {

constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kSampleThreads = 1024, kSampleBlocks = 32;  // as many elements as threads
constexpr std::uint32_t kTile = kTopkTile;
constexpr int kSteps = kTile / (4 * kThreads);  // in which a warp reads what is its own of a tile, four elements a thread
static_assert(4 * kSteps == 32, "a thread's elements of a tile are the bits of one mask");

// What the kernels of one call tell each other, in the workspace. Begins as zeros.
struct State {
  std::uint32_t histogram[kRadixRounds][kRadixBins], of_sample[kRadixBins];
  std::uint32_t finished[kRadixRounds + 3];  // blocks, of each kernel that ends with a last one
  std::int32_t guess;
  std::uint32_t is_given;
  std::uint32_t reached;  // elements that reach the guess, in the tiles that have been collected
  Verdict verdict;
  RadixPrefix prefix;
  std::uint32_t equal;     // of those whose magnitude is the key's, how many are chosen
  std::uint32_t selected;  // chosen in all
};
static_assert(sizeof(State) + 64 <= kTopkStateBytes);

// Where a tile's candidates are among all.
struct Piece {
  std::uint32_t place, count;
};

struct Work {
  TopkJob job;
  std::int32_t* report;
  bool is_reusing;
  std::uint32_t numel, tiles, capacity;
  State* state;
  Piece* pieces;         // (tiles,)
  // What is above the key in the low half, equal in the high one: of a tile, later of those before it that the same block visits; and
  // of a block's tiles, later of the blocks before.
  std::uint64_t *ranks, *ranks_of_blocks;  // (tiles,)
  std::int32_t* indices;  // (capacity,) of the candidates
  float* values;
  SamplePlan sample;
};

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

// A counter that other blocks added to, past the L1 cache; or one in the block's own memory.
template <bool is_global>
__device__ std::uint32_t read_counter(const std::uint32_t* counter) {
  if constexpr (is_global) return __ldcg(counter);
  return *counter;
}

// Takes a digit from a histogram with the whole block of `threads`: the bin that has the element of this rank. A thread looks at a group of
// bins, the first one at the highest.
template <int threads, bool is_global>
__device__ void take_digit(RadixPrefix* prefix, RadixDigit digit, std::size_t rank, const std::uint32_t* histogram) {
  constexpr int kEach = kRadixBins / threads;
  const int highest = kRadixBins - 1 - static_cast<int>(threadIdx.x) * kEach;
  std::uint32_t counts[kEach], sum = 0, total = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) sum += counts[j] = read_counter<is_global>(histogram + highest - j);
  RadixPrefix found = *prefix;  // read by all before one of them writes it, at the end: the sum waits for every thread
  found.above += sum_before_in_block<threads>(sum, &total);
  if (found.above < rank && found.above + sum >= rank) {
    int bin = highest;
#pragma unroll
    for (int j = 0; j + 1 < kEach; ++j) {
      if (bin != highest - j || found.above + counts[j] >= rank) continue;
      found.above += counts[j];
      --bin;
    }
    found.append(digit, bin);
    *prefix = found;
  }
  __syncthreads();
}

// Counts keys by a digit, in the block's own memory; of a key below zero nothing. Begins and ends with all threads together.
template <int count>
__device__ void count_keys(std::uint32_t* histogram, RadixDigit digit, const RadixPrefix& known, const std::int32_t (&keys)[count]) {
  for (int bin = threadIdx.x; bin < kRadixBins; bin += kSampleThreads) histogram[bin] = 0;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < count; ++j) {
    if (keys[j] >= 0 && known.holds(keys[j])) atomicAdd(&histogram[radix_bin(digit, keys[j])], 1u);
  }
  __syncthreads();
}

// A thread's keys of the sample: from its `first`-th element on, every kSampleThreads-th. Many loads are under way before one is used.
template <bool has_residual, int count>
__device__ void load_sample(const Work& work, std::uint32_t first, std::int32_t (&keys)[count]) {
  static_assert(kSampleThreads % SamplePlan::kLine == 0, "the elements lie as far apart as lines");
  const std::size_t begin = work.sample.index(first), step = kSampleThreads / SamplePlan::kLine * work.sample.stride;
  const int there = static_cast<int>((work.sample.count + kSampleThreads - 1 - min(std::size_t{first}, work.sample.count)) / kSampleThreads);
  constexpr int kAtOnce = count < 16 ? count : 16;
#pragma unroll
  for (int group = 0; group < count; group += kAtOnce) {
    float values[kAtOnce];
    [[maybe_unused]] float left[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const std::size_t place = begin + (group + j) * step;
      values[j] = group + j < there ? work.job.flat[place] : 0.0f;
      if constexpr (has_residual) left[j] = group + j < there ? work.job.residual[place] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if constexpr (has_residual) values[j] = add_as_cpu(values[j], left[j]);
      keys[group + j] = group + j < there ? magnitude(values[j]) : -1;
    }
  }
}

// The first digit all blocks count, each a part of the sample: its values are in few bins, at which one block's threads would queue.
// The last block finds the rest, among the few that have that digit.
template <bool has_residual>
__global__ void __launch_bounds__(kSampleThreads) sample_kernel(const __grid_constant__ Work work) {
  static_assert(kRadixRounds == 3, "a guess needs no last bits: without them more elements reach it");
  __shared__ std::uint32_t histogram[kRadixBins];
  __shared__ RadixPrefix prefix;
  State& state = *work.state;
  const std::int32_t given = work.is_reusing ? *work.report : 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) state.is_given = given > 0, state.guess = given > 0 ? given : 0;
  if (given > 0 || work.sample.rank == 0) return;
  if (threadIdx.x == 0) prefix = RadixPrefix{0, 0, 0};
  std::int32_t key[1], keys[kSampleBlocks];
  load_sample<has_residual>(work, blockIdx.x * kSampleThreads + threadIdx.x, key);
  count_keys(histogram, radix_digit(0), RadixPrefix{0, 0, 0}, key);
  for (int bin = threadIdx.x; bin < kRadixBins; bin += kSampleThreads) {
    if (histogram[bin] != 0) atomicAdd(&state.of_sample[bin], histogram[bin]);
  }
  if (!is_last_block(&state.finished[2 + kRadixRounds])) return;
  load_sample<has_residual>(work, threadIdx.x, keys);
  take_digit<kSampleThreads, true>(&prefix, radix_digit(0), work.sample.rank, state.of_sample);
  count_keys(histogram, radix_digit(1), prefix, keys);
  take_digit<kSampleThreads, false>(&prefix, radix_digit(1), work.sample.rank, histogram);
  if (threadIdx.x == 0) state.guess = prefix.key;
}

// A thread's elements of a tile, or of flat + residual, which then go to the residual.
struct Held {
  Elements<4> step[kSteps];
};
template <bool has_residual>
__device__ Held load_tile(const TopkJob& job, std::uint32_t first, std::size_t end, bool is_aligned) {
  constexpr std::size_t kStep = 4 * kWarp;
  Held held;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) held.step[step] = load_four(job.flat, first + kStep * step, end, is_aligned);
  if constexpr (has_residual) {
    Held left;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) left.step[step] = load_four(job.residual, first + kStep * step, end, is_aligned);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < 4; ++j) held.step[step].x[j] = add_as_cpu(held.step[step].x[j], left.step[step].x[j]);
      store_four(job.residual, held.step[step], first + kStep * step, end, is_aligned);
    }
  }
  return held;
}

template <bool has_residual>
__global__ void __launch_bounds__(kThreads) collect_kernel(const __grid_constant__ Work work) {
  __shared__ std::uint32_t place_of_tile;
  const TopkJob& job = work.job;
  State& state = *work.state;
  const std::int32_t guess = state.guess;
  const bool is_aligned = is_aligned16(job.flat) && is_aligned16(job.residual);
  const unsigned lane = lane_of_thread();
  for (std::uint32_t tile = blockIdx.x; tile < work.tiles; tile += gridDim.x) {
    const std::uint32_t first = tile * kTile + threadIdx.x / kWarp * (kTile / kWarpsOfBlock) + 4 * lane;
    // Two copies of the loads: one that asks nothing of each element.
    const bool is_whole = is_aligned && work.numel - tile * kTile >= kTile;
    const Held held = is_whole ? load_tile<has_residual>(job, first, ~std::size_t{0}, true)
                               : load_tile<has_residual>(job, first, work.numel, is_aligned);
    std::uint32_t mask = 0;  // bit 4 * step + j: that element reaches the guess
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < 4; ++j) mask |= static_cast<std::uint32_t>(magnitude(held.step[step].x[j]) >= guess) << (4 * step + j);
    }
    if (!is_whole) {
      for (int bit = 0; bit < 32; ++bit) {
        if (first + bit / 4 * 4 * kWarp + bit % 4 >= work.numel) mask &= ~(1u << bit);
      }
    }
    std::uint32_t count = 0;
    const std::uint32_t before = sum_before_in_block<kThreads>(static_cast<std::uint32_t>(__popc(mask)), &count);
    if (threadIdx.x == 0) {
      place_of_tile = count != 0 ? atomicAdd(&state.reached, count) : 0;
      work.pieces[tile] = {place_of_tile, count};
    }
    __syncthreads();
    std::uint32_t place = place_of_tile + __shfl_sync(kAllLanes, before, 0);  // of the warp
    if (count > work.capacity || place_of_tile > work.capacity - count) continue;  // the guess is bad
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::uint32_t here = mask >> 4 * step & 15u;
      if (__any_sync(kAllLanes, here != 0) == 0) continue;
      std::uint32_t total = 0;
      std::uint32_t mine = place + sum_before_in_warp(static_cast<std::uint32_t>(__popc(here)), &total);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if ((here >> j & 1u) == 0) continue;
        work.indices[mine] = static_cast<std::int32_t>(first + 4 * kWarp * step + j);
        work.values[mine++] = held.step[step].x[j];
      }
      place += total;
    }
  }
  if (!is_last_block(&state.finished[0]) || threadIdx.x != 0) return;
  state.verdict = judge_guess(__ldcg(&state.reached), job.k, work.capacity, state.is_given != 0, job.accepted);
}

// What the selection is among: the candidates, or everything.
struct Source {
  const float* values;
  const std::int32_t* indices;  // null: element i is the i-th
  const Piece* pieces;          // null: the tiles follow each other
  std::uint32_t count;

  __device__ Piece piece_of(std::uint32_t tile) const {
    if (pieces != nullptr) return pieces[tile];
    return {tile * kTile, min(kTile, count - tile * kTile)};
  }
};
__device__ Source source_of(const Work& work) {
  const float* const everything = work.job.residual != nullptr ? work.job.residual : work.job.flat;
  if (work.state->verdict == Verdict::kLookAgain) return {everything, nullptr, nullptr, work.numel};
  return {work.values, work.indices, work.pieces, work.state->reached};
}

// The smallest magnitude that is chosen. What was accepted is chosen whole: the smallest possible one is the guess.
__device__ std::int32_t key_of(const State& state) {
  return state.verdict == Verdict::kAccept ? state.guess : state.prefix.key;
}

template <int round>
__global__ void __launch_bounds__(kThreads) digit_kernel(const __grid_constant__ Work work) {
  __shared__ std::uint32_t histogram[kRadixBins];
  State& state = *work.state;
  if (state.verdict == Verdict::kAccept) return;
  constexpr RadixDigit kDigit = radix_digit(round);
  const Source source = source_of(work);
  const RadixPrefix prefix = state.prefix;
  for (int bin = threadIdx.x; bin < kRadixBins; bin += kThreads) histogram[bin] = 0;
  __syncthreads();
  constexpr int kAtOnce = 4;  // loads that are under way
  const std::size_t stride = std::size_t{gridDim.x} * kThreads;
  for (std::size_t i = blockIdx.x * kThreads + threadIdx.x; i < source.count; i += kAtOnce * stride) {
    std::int32_t keys[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) keys[u] = i + u * stride < source.count ? magnitude(source.values[i + u * stride]) : -1;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (keys[u] >= 0 && prefix.holds(keys[u])) atomicAdd(&histogram[radix_bin(kDigit, keys[u])], 1u);
    }
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < kRadixBins; bin += kThreads) {
    if (histogram[bin] != 0) atomicAdd(&state.histogram[round][bin], histogram[bin]);
  }
  if (is_last_block(&state.finished[1 + round])) {
    take_digit<kThreads, true>(&state.prefix, kDigit, work.job.k, state.histogram[round]);
  }
}

// The tiles of a block: they follow each other, and its warps take them in turn.
struct Share {
  std::uint32_t begin, end;

  __device__ explicit Share(std::uint32_t tiles) {
    const std::uint32_t each = (tiles + gridDim.x - 1) / gridDim.x;
    begin = min(blockIdx.x * each, tiles), end = min(begin + each, tiles);
  }
  template <class Visit>
  __device__ void visit(const Source& source, Visit visit) const {
    for (std::uint32_t tile = begin + threadIdx.x / kWarp; tile < end; tile += kWarpsOfBlock) visit(tile, source.piece_of(tile));
  }
};

// Which lanes hold an element above the key, and which one that is equal to it: a bit each.
struct Ballots {
  std::uint32_t above, equal;
};
__device__ Ballots compare(const Source& source, const Piece& piece, std::uint32_t i, std::int32_t key, float* value) {
  *value = i < piece.count ? source.values[piece.place + i] : 0.0f;
  const std::int32_t bits = i < piece.count ? magnitude(*value) : -1;
  return {__ballot_sync(kAllLanes, bits > key), __ballot_sync(kAllLanes, bits == key)};
}

// ranks[i] becomes the sum of those before it, for all i < count; returns the sum of all, to every thread.
__device__ std::uint64_t sum_ranks(std::uint64_t* ranks, std::uint32_t count) {
  constexpr int kEach = 4;
  std::uint64_t before = 0;
  for (std::uint32_t begin = 0; begin < count; begin += kEach * kThreads) {
    const std::uint32_t first = begin + threadIdx.x * kEach;
    std::uint64_t rank[kEach], sum = 0, total = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) sum += rank[j] = first + j < count ? __ldcg(ranks + first + j) : 0;
    std::uint64_t here = before + sum_before_in_block<kThreads>(sum, &total);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (first + j < count) ranks[first + j] = here;
      here += rank[j];
    }
    before += total;
  }
  return before;
}

__global__ void __launch_bounds__(kThreads) rank_kernel(const __grid_constant__ Work work) {
  State& state = *work.state;
  const Source source = source_of(work);
  const std::int32_t key = key_of(state);
  const Share share(work.tiles);
  share.visit(source, [&](std::uint32_t tile, const Piece& piece) {
    std::uint64_t rank = 0;
#pragma unroll 4
    for (std::uint32_t begin = 0; begin < piece.count; begin += kWarp) {
      float value;
      const Ballots ballots = compare(source, piece, begin + lane_of_thread(), key, &value);
      rank += static_cast<std::uint64_t>(__popc(ballots.equal)) << 32 | static_cast<std::uint32_t>(__popc(ballots.above));
    }
    if (lane_of_thread() == 0) work.ranks[tile] = rank;
  });
  __syncthreads();
  const std::uint64_t of_block = sum_ranks(work.ranks + share.begin, share.end - share.begin);
  if (threadIdx.x == 0) work.ranks_of_blocks[blockIdx.x] = of_block;
  if (!is_last_block(&state.finished[1 + kRadixRounds])) return;
  const std::uint64_t total = sum_ranks(work.ranks_of_blocks, gridDim.x);
  if (threadIdx.x != 0) return;
  const bool is_accepted = state.verdict == Verdict::kAccept;
  state.equal = is_accepted ? static_cast<std::uint32_t>(total >> 32) : static_cast<std::uint32_t>(work.job.k - state.prefix.above);
  state.selected = is_accepted ? state.reached : static_cast<std::uint32_t>(work.job.k);
  if (work.report == nullptr) return;
  work.report[0] = key;
  work.report[1] = static_cast<std::int32_t>(state.selected);
  work.report[2] = !is_accepted;
}

__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ Work work) {
  const TopkJob& job = work.job;
  const State& state = *work.state;
  const Source source = source_of(work);
  const std::int32_t key = key_of(state);
  const std::uint32_t own = 1u << lane_of_thread();
  const std::uint64_t before = work.ranks_of_blocks[blockIdx.x];
  Share(work.tiles).visit(source, [&](std::uint32_t tile, const Piece& piece) {
    const std::uint64_t rank = before + work.ranks[tile];
    std::uint32_t above = static_cast<std::uint32_t>(rank), equal = static_cast<std::uint32_t>(rank >> 32);  // in what is before
    for (std::uint32_t begin = 0; begin < piece.count; begin += kWarp) {
      const std::uint32_t i = begin + lane_of_thread();
      float value;
      const Ballots ballots = compare(source, piece, i, key, &value);
      const std::uint32_t its_equal = equal + static_cast<std::uint32_t>(__popc(ballots.equal & (own - 1)));
      if ((ballots.above & own) != 0 || ((ballots.equal & own) != 0 && its_equal < state.equal)) {
        const std::uint32_t place = above + static_cast<std::uint32_t>(__popc(ballots.above & (own - 1))) + min(its_equal, state.equal);
        const std::int32_t index =
            source.indices != nullptr ? source.indices[piece.place + i] : static_cast<std::int32_t>(piece.place + i);
        job.indices[place] = index;
        job.values[place] = value;
        if (job.residual != nullptr) job.residual[index] = 0.0f;
      }
      above += static_cast<std::uint32_t>(__popc(ballots.above)), equal += static_cast<std::uint32_t>(__popc(ballots.equal));
    }
  });
  const std::size_t stride = std::size_t{gridDim.x} * kThreads;
  for (std::size_t i = state.selected + blockIdx.x * std::size_t{kThreads} + threadIdx.x; i < job.k; i += stride) {
    job.indices[i] = static_cast<std::int32_t>(job.numel - 1);
    job.values[i] = 0.0f;
  }
}

}  // namespace

int topk_cuda(const TopkJob& job, std::int32_t* report, bool is_reusing, void* stream) {
  const auto numel = static_cast<std::uint32_t>(job.numel), tiles = static_cast<std::uint32_t>(topk_tiles(job.numel));
  Work work{job, report, is_reusing && report != nullptr, numel, tiles, static_cast<std::uint32_t>(topk_candidates(job.numel, job.k)),
            nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, SamplePlan(job.numel, job.k, std::size_t{kSampleThreads} * kSampleBlocks)};
  const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(job.workspace) + 15) / 16 * 16;
  work.state = reinterpret_cast<State*>(begin);
  work.pieces = reinterpret_cast<Piece*>(begin + kTopkStateBytes - 16);
  work.ranks = reinterpret_cast<std::uint64_t*>(work.pieces + tiles);
  work.ranks_of_blocks = work.ranks + tiles;  // no more blocks than tiles
  work.values = reinterpret_cast<float*>(work.ranks_of_blocks + tiles);
  work.indices = reinterpret_cast<std::int32_t*>(work.values + work.capacity);
  unsigned blocks = 0, digit_blocks = 0;
  cudaError_t error = count_blocks(std::size_t{tiles} * kThreads, kBlocksPerMultiprocessor, &blocks);
  if (error == cudaSuccess) error = count_blocks(std::size_t{tiles} * kThreads, 2, &digit_blocks);  // each adds its bins to those of all
  if (error == cudaSuccess) error = cudaMemsetAsync(work.state, 0, sizeof(State), static_cast<cudaStream_t>(stream));
  const bool has_residual = job.residual != nullptr;
  const auto queue = [&](auto kernel, unsigned count, int threads) {
    if (error == cudaSuccess) error = launch_kernel(kernel, count, threads, stream, work);
  };
  queue(has_residual ? &sample_kernel<true> : &sample_kernel<false>, kSampleBlocks, kSampleThreads);
  queue(has_residual ? &collect_kernel<true> : &collect_kernel<false>, blocks, kThreads);
  for (const auto kernel : {&digit_kernel<0>, &digit_kernel<1>, &digit_kernel<2>}) queue(kernel, digit_blocks, kThreads);
  queue(&rank_kernel, blocks, kThreads);
  queue(&write_kernel, blocks, kThreads);
  return error;
}

}  // namespace pycomm
