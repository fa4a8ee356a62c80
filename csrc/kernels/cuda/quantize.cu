// The idea: a warp takes a block (8 threads one of 32 elements), each thread four elements, 16 bytes, at a time. It needs
// the block twice: once for the scale, which the threads agree on by shuffles, once to encode. Whole blocks of a format's own length
// stay in registers meanwhile; others are read again, from the L1 cache. Bytes moved per element: 4 read, kCodeBits / 8 written; with a residual 8 read and 4 more written.
#include "../common/philox.h"
#include "../common/quantizers.h"
#include "launch.h"
#include "quantize.h"

namespace pycomm {
namespace {

constexpr int kBlocksPerMultiprocessor = 16;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct Four {
  float x[4];
};

// Elements [i, i + 4) of `from`; zeros from `end` on.
__device__ Four load_four(const float* from, std::size_t i, std::size_t end, bool is_aligned) {
  Four four = {};
  if (is_aligned && i + 4 <= end) {
    const float4 loaded = *reinterpret_cast<const float4*>(from + i);
    return {{loaded.x, loaded.y, loaded.z, loaded.w}};
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (i + j < end) four.x[j] = from[i + j];
  }
  return four;
}

__device__ void store_four(float* to, const Four& four, std::size_t i, std::size_t end, bool is_aligned) {
  if (is_aligned && i + 4 <= end) {
    *reinterpret_cast<float4*>(to + i) = make_float4(four.x[0], four.x[1], four.x[2], four.x[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (i + j < end) to[i + j] = four.x[j];
  }
}

template <bool has_residual>
__device__ Four load_input(const QuantizeJob& job, std::size_t i, std::size_t end, bool is_aligned) {
  Four input = load_four(job.flat, i, end, is_aligned);
  if constexpr (has_residual) {
    const Four residual = load_four(job.residual, i, end, is_aligned);
#pragma unroll
    for (int j = 0; j < 4; ++j) input.x[j] = input.x[j] + residual.x[j];
  }
  return input;
}

// What a block's scale is made of: of a sign its sum, in the order of [Note: lanes of a sum], where thread t has the lanes 4 t .. 4 t + 3.
template <class Format>
struct Reach {
  Four sums = {};
  int amax = 0;

  __device__ void add(const Four& input) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (Format::kFormat == PayloadFormat::kSign) sums.x[j] = sums.x[j] + fabsf(input.x[j]);
      else amax = max(amax, __float_as_int(input.x[j]) & 0x7FFFFFFF);
    }
  }

  // The scale of the block of `numel`, known to all of its threads.
  template <int threads>
  __device__ BlockScale scale(std::size_t numel) {
    if constexpr (Format::kFormat == PayloadFormat::kSign) {
#pragma unroll
      for (int step = threads / 2; step > 0; step /= 2) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums.x[j] = sums.x[j] + __shfl_down_sync(kAllLanes, sums.x[j], step, threads);
      }
      const float total = (sums.x[0] + sums.x[2]) + (sums.x[1] + sums.x[3]);
      return make_sign_scale(__shfl_sync(kAllLanes, total, 0, threads), numel);
    } else {
#pragma unroll
      for (int step = threads / 2; step > 0; step /= 2) amax = max(amax, __shfl_xor_sync(kAllLanes, amax, step, threads));
      return Format::scale(amax);
    }
  }
};

// 16 random bits for each of four elements from `index` on.
__device__ void draw_four(std::uint64_t seed, std::uint64_t index, int random[4]) {
  PhiloxWords words = philox(seed, index / kPhiloxGroup);
#pragma unroll
  for (int j = 0; j < 4; ++j, ++index) {
    if (j > 0 && index % kPhiloxGroup == 0) words = philox(seed, index / kPhiloxGroup);
    const std::uint32_t word = words.word[index / 2 % 4];
    random[j] = static_cast<int>(index % 2 != 0 ? word >> 16 : word & 0xFFFFu);
  }
}

// Writes four codes of `bits` to where those of element i belong. All threads of the warp call it.
template <int bits>
__device__ void store_codes(unsigned char* codes, const int code[4], std::size_t i, std::size_t end) {
  constexpr int kMask = (1 << bits) - 1;
  unsigned packed = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) packed |= static_cast<unsigned>(code[j] & kMask) << (bits * j);
  if constexpr (bits == 8) {
    if (i + 4 <= end && reinterpret_cast<std::uintptr_t>(codes) % 4 == 0) {
      *reinterpret_cast<unsigned*>(codes + i) = packed;
      return;
    }
    for (int j = 0; j < 4 && i + j < end; ++j) codes[i + j] = static_cast<unsigned char>(packed >> 8 * j);
  } else if constexpr (bits == 4) {
    if (i < end) codes[i / 2] = static_cast<unsigned char>(packed);
    if (i + 2 < end) codes[i / 2 + 1] = static_cast<unsigned char>(packed >> 8);
  } else if constexpr (bits == 2) {
    if (i < end) codes[i / 4] = static_cast<unsigned char>(packed);
  } else {
    const unsigned next = __shfl_down_sync(kAllLanes, packed, 1);
    if (i < end && i % 8 == 0) codes[i / 8] = static_cast<unsigned char>(packed | next << 4);
  }
}

template <class Format>
__device__ void store_scale(unsigned char* payload, std::size_t block, unsigned stored) {
  if constexpr (Format::kIsMx) {
    payload[block] = static_cast<unsigned char>(stored);
  } else if (reinterpret_cast<std::uintptr_t>(payload) % 4 == 0) {
    reinterpret_cast<unsigned*>(payload)[block] = stored;
  } else {
    for (int k = 0; k < 4; ++k) payload[4 * block + k] = static_cast<unsigned char>(stored >> 8 * k);
  }
}

// Encodes four elements and returns what is left of them.
template <class Format, bool stochastic>
__device__ Four encode_four(const QuantizeJob& job, const BlockScale& scale, const Four& input, std::size_t i, int code[4]) {
  Four left = {};
  if (!scale.is_finite) {
    code[0] = code[1] = code[2] = code[3] = 0;
    return left;
  }
  [[maybe_unused]] int random[4] = {};
  if constexpr (stochastic) draw_four(job.seed, job.offset + i, random);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (Format::kFormat == PayloadFormat::kSign) {
      const int bits = __float_as_int(input.x[j]);
      code[j] = static_cast<int>(static_cast<unsigned>(bits) >> 31);
      left.x[j] = input.x[j] - __int_as_float((bits & static_cast<int>(0x80000000u)) | __float_as_int(scale.scale));
    } else {
      const auto encoded = Format::Code::template encode<Scalar, stochastic>(input.x[j] * scale.inverse, random[j]);
      code[j] = encoded.with_sign();
      left.x[j] = input.x[j] - encoded.value() * scale.scale;
    }
  }
  return left;
}

// `threads` to a block, of which each has `held` times four elements; held 0 is for blocks of any length, as are those at the end. Whole
// warps stay together to the end, for the shuffles.
template <class Format, bool stochastic, bool has_residual, int threads, int held>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __grid_constant__ QuantizeJob job, const __grid_constant__ PayloadLayout layout) {
  constexpr int kPerWarp = 32 / threads;
  const std::size_t whole_blocks = job.numel / job.block_numel;
  const bool is_aligned = (reinterpret_cast<std::uintptr_t>(job.flat) | reinterpret_cast<std::uintptr_t>(job.residual)) % 16 == 0;
  const int lane = threadIdx.x % 32, thread = lane % threads;
  const std::size_t warp = (blockIdx.x * std::size_t{kThreads} + threadIdx.x) / 32;
  const std::size_t warps = std::size_t{gridDim.x} * kThreads / 32;
  const std::size_t scales = layout.num_blocks * layout.scale_bytes;
  if (warp == 0) {
    for (std::size_t i = scales + lane; i < layout.codes_offset; i += 32) job.payload[i] = 0;
  }
  for (std::size_t first = warp * kPerWarp; first < layout.num_blocks; first += warps * kPerWarp) {
    const std::size_t block = first + lane / threads;
    const std::size_t begin = min(block * job.block_numel, job.numel), end = min(begin + job.block_numel, job.numel);
    const auto encode = [&](const BlockScale& scale, const Four& input, std::size_t i, std::size_t stop) {
      int code[4];
      const Four left = encode_four<Format, stochastic>(job, scale, input, i, code);
      store_codes<kCodeBits[static_cast<int>(Format::kFormat)]>(job.payload + layout.codes_offset, code, i, stop);
      if constexpr (has_residual) store_four(job.residual, left, i, stop, is_aligned);
    };
    Reach<Format> reach;
    if constexpr (held > 0) {
      if (is_aligned && first + kPerWarp <= whole_blocks) {
        Four input[held];
#pragma unroll
        for (int h = 0; h < held; ++h) input[h] = load_input<has_residual>(job, begin + 4 * (h * threads + thread), end, true);
#pragma unroll
        for (int h = 0; h < held; ++h) reach.add(input[h]);
        const BlockScale scale = reach.template scale<threads>(4 * threads * held);
        if (thread == 0) store_scale<Format>(job.payload, block, scale.stored);
#pragma unroll
        for (int h = 0; h < held; ++h) encode(scale, input[h], begin + 4 * (h * threads + thread), end);
        continue;
      }
    }
    for (std::size_t i = begin + 4 * thread; i < end; i += 4 * threads) reach.add(load_input<has_residual>(job, i, end, is_aligned));
    const BlockScale scale = reach.template scale<threads>(end - begin);
    if (thread == 0 && begin < end) store_scale<Format>(job.payload, block, scale.stored);
    for (std::size_t at = 0; at < job.block_numel; at += 4 * threads) {
      const std::size_t i = begin + at + 4 * thread;
      const std::size_t stop = min(end, begin + at + 4 * threads);
      encode(scale, load_input<has_residual>(job, i, stop, is_aligned), i, stop);
    }
  }
}

// Four codes of `bits`, from where those of element i are.
template <int bits>
__device__ unsigned load_codes(const unsigned char* codes, std::size_t i, std::size_t end) {
  if constexpr (bits == 8) {
    if (i + 4 <= end && reinterpret_cast<std::uintptr_t>(codes) % 4 == 0) {
      return *reinterpret_cast<const unsigned*>(codes + i);
    }
    unsigned packed = 0;
    for (int j = 0; j < 4 && i + j < end; ++j) packed |= static_cast<unsigned>(codes[i + j]) << 8 * j;
    return packed;
  } else if constexpr (bits == 4) {
    return codes[i / 2] | (i + 2 < end ? static_cast<unsigned>(codes[i / 2 + 1]) << 8 : 0u);
  } else if constexpr (bits == 2) {
    return codes[i / 4];
  } else {
    return static_cast<unsigned>(codes[i / 8]) >> i % 8;
  }
}

__device__ unsigned load_scale(const unsigned char* payload, std::size_t block) {
  if (reinterpret_cast<std::uintptr_t>(payload) % 4 == 0) return reinterpret_cast<const unsigned*>(payload)[block];
  unsigned stored = 0;
  for (int k = 0; k < 4; ++k) stored |= static_cast<unsigned>(payload[4 * block + k]) << 8 * k;
  return stored;
}

template <class Format, bool is_added>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const __grid_constant__ DequantizeJob job, const __grid_constant__ PayloadLayout layout) {
  constexpr int bits = kCodeBits[static_cast<int>(Format::kFormat)];
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(job.flat) % 16 == 0;
  const std::size_t stride = std::size_t{gridDim.x} * kThreads * 4;
  for (std::size_t i = (blockIdx.x * std::size_t{kThreads} + threadIdx.x) * 4; i < job.numel; i += stride) {
    const std::size_t block = i / job.block_numel;
    float scale;
    if constexpr (Format::kIsMx) {
      scale = mx_scale(job.payload[block]);
    } else {
      scale = __uint_as_float(load_scale(job.payload, block));
    }
    scale = scale * job.factor;
    const unsigned packed = load_codes<bits>(job.payload + layout.codes_offset, i, job.numel);
    Four values = {};
    if constexpr (is_added) values = load_four(job.flat, i, job.numel, is_aligned);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const unsigned code = packed >> (bits * j) & ((1u << bits) - 1);
      float value;
      if constexpr (Format::kFormat == PayloadFormat::kSign) {
        value = __uint_as_float(__float_as_uint(scale) ^ code << 31);
      } else {
        value = Format::Code::template decode<Scalar>(static_cast<int>(code)) * scale;
      }
      if constexpr (is_added) value = values.x[j] + value;
      values.x[j] = Native<float>::encode<Scalar>(value);
    }
    store_four(job.flat, values, i, job.numel, is_aligned);
  }
}

template <class Job>
cudaError_t launch(void (*kernel)(Job, PayloadLayout), const Job& job, std::size_t threads, void* stream) {
  unsigned blocks = 0;
  const cudaError_t error = count_blocks(threads, kBlocksPerMultiprocessor, &blocks);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, blocks, kThreads, stream, job, PayloadLayout(job.format, job.numel, job.block_numel));
}

template <class Format, bool stochastic, bool has_residual>
cudaError_t launch_quantize(const QuantizeJob& job, void* stream) {
  const std::size_t blocks = PayloadLayout(job.format, job.numel, job.block_numel).num_blocks;
  const auto launch_with = [&](auto kernel, int threads) { return launch<QuantizeJob>(kernel, job, threads * blocks, stream); };
  if constexpr (Format::kIsMx) {  // 32 by definition
    return launch_with(quantize_kernel<Format, stochastic, has_residual, 8, 1>, 8);
  } else {
    if constexpr (Format::kFormat != PayloadFormat::kSign) {
      if (job.block_numel == 32) return launch_with(quantize_kernel<Format, stochastic, has_residual, 8, 1>, 8);
    }
    constexpr int bits = kCodeBits[static_cast<int>(Format::kFormat)], held = bits == 8 ? 2 : bits == 4 ? 1 : 8;  // the formats' own lengths
    if (job.block_numel == 128 * held) return launch_with(quantize_kernel<Format, stochastic, has_residual, 32, held>, 32);
    return launch_with(quantize_kernel<Format, stochastic, has_residual, 32, 0>, 32);
  }
}

template <class Format>
cudaError_t launch_rounded(const QuantizeJob& job, void* stream) {
  const bool has_residual = job.residual != nullptr;
  if constexpr (Format::kFormat != PayloadFormat::kSign) {
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

int dequantize_cuda(const DequantizeJob& job, void* stream) {
  if (job.numel == 0) return cudaSuccess;
  return visit_format(job.format, [&](auto format) {
    using Format = decltype(format);
    const std::size_t threads = (job.numel + 3) / 4;
    return job.is_added ? launch<DequantizeJob>(dequantize_kernel<Format, true>, job, threads, stream)
                        : launch<DequantizeJob>(dequantize_kernel<Format, false>, job, threads, stream);
  });
}

}  // namespace pycomm
