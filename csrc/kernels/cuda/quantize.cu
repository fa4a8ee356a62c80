// The idea: the threads of a block agree on its scale by shuffles, then each encodes what it holds. Blocks of the usual lengths, where
// they are aligned, go by tiles: a warp loads a tile whole into registers, so that many loads are under way, and no element is read
// twice or asked whether it is the last. Blocks of any length, and what the tiles leave, are read twice, the second time from the L1
// cache. Bytes moved per element: 4 read, kCodeBits / 8 written; with a residual 8 read and 4 more written.
#include "../common/philox.h"
#include "../common/quantizers.h"
#include "block.h"
#include "elements.h"
#include "launch.h"
#include "quantize.h"

namespace pycomm {
namespace {

constexpr int kBlocksPerMultiprocessor = 16;

template <class Format>
constexpr int kBits = kCodeBits[static_cast<int>(Format::kFormat)];
template <class Format>
constexpr bool kIsSign = Format::kFormat == PayloadFormat::kSign;

// What a warp takes at a time: `held` chunks, of which each thread has `width` elements that follow each other. A block is `threads` of
// a chunk, or `deep` whole chunks.
template <int threads, int width, int deep, int held>
struct Tile {
  static_assert(held % deep == 0 && (deep == 1 || threads == kWarp));
  static constexpr int kThreads = threads, kWidth = width, kDeep = deep, kHeld = held;
  static constexpr int kChunk = kWarp * width, kNumel = held * kChunk;
  static constexpr int kBlockNumel = threads * width * deep, kBlocks = kNumel / kBlockNumel;
};
struct NoTile {
  static constexpr int kNumel = 0;
};

// For blocks of the own length of a format with codes of `bits`.
template <int bits>
struct OwnTile : Tile<32, 8, 1, 2> {};
template <>
struct OwnTile<4> : Tile<16, 8, 1, 2> {};
template <>
struct OwnTile<2> : Tile<32, 8, 4, 4> {};
template <>
struct OwnTile<1> : Tile<32, 4, 8, 8> {};

// What a block's scale is made of: of a sign its sum, in the order of [Note: lanes of a sum], where thread t has the lanes 4 t .. 4 t + 3.
template <class Format, int width>
struct Reach {
  static_assert(!kIsSign<Format> || width == 4);
  Elements<width> sums = {};
  int amax = 0;

  __device__ void add(const Elements<width>& input) {
#pragma unroll
    for (int j = 0; j < width; ++j) {
      if constexpr (kIsSign<Format>) sums.x[j] = sums.x[j] + fabsf(input.x[j]);
      else amax = max(amax, __float_as_int(input.x[j]) & 0x7FFFFFFF);
    }
  }

  // The scale of the block of `numel`, known to all of its `threads`.
  __device__ BlockScale<Scalar> scale(int threads, std::size_t numel) {
    if constexpr (kIsSign<Format>) {
#pragma unroll
      for (int step = threads / 2; step > 0; step /= 2) {
#pragma unroll
        for (int j = 0; j < width; ++j) sums.x[j] = sums.x[j] + __shfl_down_sync(kAllLanes, sums.x[j], step, threads);
      }
      const float total = (sums.x[0] + sums.x[2]) + (sums.x[1] + sums.x[3]);
      return Format::template scale<Scalar>(__float_as_int(__shfl_sync(kAllLanes, total, 0, threads) / static_cast<float>(numel)));
    } else {
#pragma unroll
      for (int step = threads / 2; step > 0; step /= 2) amax = max(amax, __shfl_xor_sync(kAllLanes, amax, step, threads));
      return Format::template scale<Scalar>(amax);
    }
  }
};

// 16 random bits for each of `width` elements from `index` on.
template <int width>
__device__ void draw(std::uint64_t seed, std::uint64_t index, int* random) {
  static_assert(width <= kPhiloxGroup && kPhiloxGroup == 8);
  const PhiloxWords first = philox(seed, index / kPhiloxGroup);
  std::uint32_t word[8] = {first.word[0], first.word[1], first.word[2], first.word[3]};
  const auto skipped = static_cast<unsigned>(index % kPhiloxGroup);
  if (skipped + width > kPhiloxGroup) {
    const PhiloxWords next = philox(seed, index / kPhiloxGroup + 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) word[4 + i] = next.word[i];
  }
  if (skipped != 0) {  // those halves go: four, two and one of them
#pragma unroll
    for (int i = 0; i < 6; ++i) word[i] = (skipped & 4u) != 0 ? word[i + 2] : word[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) word[i] = (skipped & 2u) != 0 ? word[i + 1] : word[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = (skipped & 1u) != 0 ? word[i] >> 16 | word[i + 1] << 16 : word[i];
  }
#pragma unroll
  for (int j = 0; j < width; ++j) random[j] = static_cast<int>(j % 2 != 0 ? word[j / 2] >> 16 : word[j / 2] & 0xFFFFu);
}

// Encodes the elements, the first of which is the `index`-th of the stream of random numbers, and returns what is left of them.
template <class Format, bool stochastic, int width>
__device__ Elements<width> encode(const BlockScale<Scalar>& scale, const Elements<width>& input, std::uint64_t seed, std::uint64_t index,
                                  unsigned* code) {
  Elements<width> left = {};
  if (differs(scale.scale, scale.scale)) {
#pragma unroll
    for (int j = 0; j < width; ++j) code[j] = 0;
    return left;
  }
  [[maybe_unused]] int random[width] = {};
  if constexpr (stochastic) draw<width>(seed, index, random);
#pragma unroll
  for (int j = 0; j < width; ++j) {
    if constexpr (kIsSign<Format>) {
      const int bits = __float_as_int(input.x[j]);
      code[j] = static_cast<unsigned>(bits) >> 31;
      left.x[j] = input.x[j] - __int_as_float((bits & static_cast<int>(0x80000000u)) | __float_as_int(scale.scale));
    } else {
      const auto encoded = Format::Code::template encode<Scalar, stochastic>(input.x[j] * scale.inverse, random[j]);
      code[j] = static_cast<unsigned>(encoded.with_sign()) & ((1u << kBits<Format>) - 1);
      left.x[j] = input.x[j] - encoded.value() * scale.scale;
    }
  }
  return left;
}

// The first `count` codes from code[0] on, as they lie in memory.
template <int bits, int count>
__device__ std::uint32_t join_codes(const unsigned* code) {
  static_assert(bits * count <= 32);
  std::uint32_t joined = 0;
#pragma unroll
  for (int j = 0; j < count; ++j) joined |= code[j] << (bits * j);
  return joined;
}

// Writes a thread's codes of a chunk to where they belong, a whole number of items. All threads of the warp call it.
template <int bits, int width>
__device__ void store_chunk(unsigned char* to, const unsigned* code) {
  constexpr int kAll = bits * width;
  if constexpr (kAll == 64) {
    const std::uint64_t low = join_codes<bits, width / 2>(code), high = join_codes<bits, width / 2>(code + width / 2);
    *reinterpret_cast<std::uint64_t*>(to) = high << 32 | low;
  } else if constexpr (kAll == 32) {
    *reinterpret_cast<std::uint32_t*>(to) = join_codes<bits, width>(code);
  } else if constexpr (kAll == 16) {
    *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(join_codes<bits, width>(code));
  } else {
    static_assert(kAll == 4);
    const std::uint32_t joined = join_codes<bits, width>(code), next = __shfl_down_sync(kAllLanes, joined, 1);
    if (threadIdx.x % 2 == 0) *to = static_cast<unsigned char>(joined | next << 4);
  }
}

// Encodes the whole tiles; returns how many blocks that were.
template <class Format, bool stochastic, bool has_residual, class Tile>
__device__ std::size_t encode_tiles(const QuantizeJob& job, const PayloadLayout& layout) {
  constexpr int kWidth = Tile::kWidth, kChunkCodes = Tile::kChunk * kBits<Format> / 8;
  using Scale = std::conditional_t<Format::kIsMx, std::uint8_t, std::uint32_t>;
  const std::size_t tiles = job.numel / Tile::kNumel;
  const std::size_t first = warp_of_thread(), step = warps_of_grid();
  const unsigned lane = lane_of_thread();
  std::size_t at = first * Tile::kNumel + lane * kWidth;
  unsigned char* codes = job.payload + layout.codes_offset + at * kBits<Format> / 8;
  Scale* scales = reinterpret_cast<Scale*>(job.payload) + first * Tile::kBlocks + lane / Tile::kThreads;
  for (std::size_t tile = first; tile < tiles; tile += step) {
    Elements<kWidth> input[Tile::kHeld];
#pragma unroll
    for (int chunk = 0; chunk < Tile::kHeld; ++chunk) input[chunk] = load_whole<kWidth>(job.flat + at + chunk * Tile::kChunk);
    if constexpr (has_residual) {
#pragma unroll
      for (int chunk = 0; chunk < Tile::kHeld; ++chunk) {
        input[chunk] = input[chunk] + load_whole<kWidth>(job.residual + at + chunk * Tile::kChunk);
      }
    }
#pragma unroll
    for (int begin = 0; begin < Tile::kHeld; begin += Tile::kDeep) {
      Reach<Format, kWidth> reach;
#pragma unroll
      for (int chunk = begin; chunk < begin + Tile::kDeep; ++chunk) reach.add(input[chunk]);
      const BlockScale<Scalar> scale = reach.scale(Tile::kThreads, Tile::kBlockNumel);
      if (lane % Tile::kThreads == 0) scales[begin / Tile::kDeep * (kWarp / Tile::kThreads)] = static_cast<Scale>(scale.stored);
#pragma unroll
      for (int chunk = begin; chunk < begin + Tile::kDeep; ++chunk) {
        unsigned code[kWidth];
        const std::size_t place = at + chunk * Tile::kChunk;
        const Elements<kWidth> left = encode<Format, stochastic>(scale, input[chunk], job.seed, job.offset + place, code);
        store_chunk<kBits<Format>, kWidth>(codes + chunk * kChunkCodes, code);
        if constexpr (has_residual) store_by_warp(job.residual + place, left);
      }
    }
    at += step * Tile::kNumel, codes += step * Tile::kHeld * kChunkCodes, scales += step * Tile::kBlocks;
  }
  return tiles * Tile::kBlocks;
}

// Writes the codes of elements [i, i + 4), but for those from `end` on, to where they belong. All threads of the warp call it.
template <int bits>
__device__ void store_codes(unsigned char* codes, const unsigned* code, std::size_t i, std::size_t end) {
  const std::uint32_t joined = join_codes<bits, 4>(code);
  if constexpr (bits == 8) {
    for (int j = 0; j < 4 && i + j < end; ++j) codes[i + j] = static_cast<unsigned char>(joined >> 8 * j);
  } else if constexpr (bits == 4) {
    if (i < end) codes[i / 2] = static_cast<unsigned char>(joined);
    if (i + 2 < end) codes[i / 2 + 1] = static_cast<unsigned char>(joined >> 8);
  } else if constexpr (bits == 2) {
    if (i < end) codes[i / 4] = static_cast<unsigned char>(joined);
  } else {
    const std::uint32_t next = __shfl_down_sync(kAllLanes, joined, 1);
    if (i < end && i % 8 == 0) codes[i / 8] = static_cast<unsigned char>(joined | next << 4);
  }
}

template <class Format>
__device__ void store_scale(unsigned char* payload, std::size_t block, std::uint32_t stored) {
  if constexpr (Format::kIsMx) {
    payload[block] = static_cast<unsigned char>(stored);
  } else {
    for (int k = 0; k < 4; ++k) payload[4 * block + k] = static_cast<unsigned char>(stored >> 8 * k);
  }
}

// Encodes the blocks from `done` on, of any length: a warp takes one, or several short ones. Its threads stay together to the end, for
// the shuffles.
template <class Format, bool stochastic, bool has_residual>
__device__ void encode_rest(const QuantizeJob& job, const PayloadLayout& layout, std::size_t done) {
  const int threads = job.block_numel == 32 ? 8 : job.block_numel == 64 ? 16 : kWarp, per_warp = kWarp / threads;
  const bool is_aligned = is_aligned16(job.flat) && is_aligned16(job.residual);
  const int lane = static_cast<int>(lane_of_thread()), thread = lane % threads;
  const std::size_t step = std::size_t{warps_of_grid()} * per_warp;
  for (std::size_t first = done + std::size_t{warp_of_thread()} * per_warp; first < layout.num_blocks; first += step) {
    const std::size_t block = first + lane / threads;
    const std::size_t begin = min(block * job.block_numel, job.numel), end = min(begin + job.block_numel, job.numel);
    const auto load_input = [&](std::size_t i) {
      const Elements<4> input = load_four(job.flat, i, end, is_aligned);
      if constexpr (has_residual) return input + load_four(job.residual, i, end, is_aligned);
      return input;
    };
    Reach<Format, 4> reach;
    for (std::size_t i = begin + 4 * thread; i < end; i += 4 * threads) reach.add(load_input(i));
    const BlockScale<Scalar> scale = reach.scale(threads, end - begin);
    if (thread == 0 && begin < end) store_scale<Format>(job.payload, block, scale.stored);
    for (std::size_t at = 0; at < job.block_numel; at += 4 * threads) {
      const std::size_t i = begin + at + 4 * thread;
      unsigned code[4];
      const Elements<4> left = encode<Format, stochastic>(scale, load_input(i), job.seed, job.offset + i, code);
      store_codes<kBits<Format>>(job.payload + layout.codes_offset, code, i, end);
      if constexpr (has_residual) store_four(job.residual, left, i, end, is_aligned);
    }
  }
}

template <class Format, bool stochastic, bool has_residual, class Tile>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __grid_constant__ QuantizeJob job, const __grid_constant__ PayloadLayout layout) {
  if (blockIdx.x == 0) {
    for (std::size_t i = layout.num_blocks * layout.scale_bytes + threadIdx.x; i < layout.codes_offset; i += kThreads) job.payload[i] = 0;
  }
  std::size_t done = 0;
  if constexpr (Tile::kNumel > 0) done = encode_tiles<Format, stochastic, has_residual, Tile>(job, layout);
  encode_rest<Format, stochastic, has_residual>(job, layout, done);
}

template <class Format, bool stochastic, bool has_residual>
cudaError_t launch_quantize(const QuantizeJob& job, void* stream) {
  const PayloadLayout layout(job.format, job.numel, job.block_numel);
  const auto launch_with = [&](auto tile, std::size_t threads) {
    unsigned blocks = 0;
    if (const cudaError_t error = count_blocks(threads, kBlocksPerMultiprocessor, &blocks); error != cudaSuccess) return error;
    const auto kernel = &quantize_kernel<Format, stochastic, has_residual, decltype(tile)>;
    return launch_kernel(kernel, blocks, kThreads, stream, job, layout);
  };
  const auto launch_tiles = [&](auto tile) { return launch_with(tile, job.numel / (tile.kWidth * tile.kHeld) + kWarp); };
  if (is_aligned16(job.flat) && is_aligned16(job.residual) && is_aligned16(job.payload)) {
    if constexpr (!kIsSign<Format>) {
      if (job.block_numel == 32) return launch_tiles(Tile<4, 8, 1, 2>{});
    }
    if constexpr (!Format::kIsMx) {
      using Own = OwnTile<kBits<Format>>;
      if (job.block_numel == Own::kBlockNumel) return launch_tiles(Own{});
    }
  }
  return launch_with(NoTile{}, layout.num_blocks * std::min<std::size_t>(kWarp, job.block_numel / 4));
}

template <class Format>
cudaError_t launch_rounded(const QuantizeJob& job, void* stream) {
  const bool has_residual = job.residual != nullptr;
  if constexpr (!kIsSign<Format>) {
    if (job.is_stochastic) {
      return has_residual ? launch_quantize<Format, true, true>(job, stream)
                          : launch_quantize<Format, true, false>(job, stream);
    }
  }
  return has_residual ? launch_quantize<Format, false, true>(job, stream)
                      : launch_quantize<Format, false, false>(job, stream);
}

}  // namespace

int quantize_cuda(const QuantizeJob& job, void* stream) {
  if (job.numel == 0) return cudaSuccess;
  return visit_format(job.format, [&](auto format) { return launch_rounded<decltype(format)>(job, stream); });
}

}  // namespace pycomm
