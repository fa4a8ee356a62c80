// The idea: a thread decodes eight elements that follow each other: their codes are one load of 1 to 8 bytes, the elements two of 16.
// Bytes moved per element: kCodeBits / 8 read, 4 written; added to what is there, 4 more read.
#include "../common/quantizers.h"
#include "block.h"
#include "elements.h"
#include "launch.h"
#include "quantize.h"

namespace pycomm {
namespace {

constexpr int kBlocksPerMultiprocessor = 16;
constexpr int kWidth = 8;  // elements; a block is a multiple of it

// The codes of elements [i, i + 8), whose bytes begin at `from`, aligned to their length.
template <int bits>
__device__ std::uint64_t load_codes_whole(const unsigned char* from) {
  if constexpr (bits == 8) return *reinterpret_cast<const std::uint64_t*>(from);
  if constexpr (bits == 4) return *reinterpret_cast<const std::uint32_t*>(from);
  if constexpr (bits == 2) return *reinterpret_cast<const std::uint16_t*>(from);
  return *from;
}

// Those of `count` elements; the others are zeros.
template <int bits>
__device__ std::uint64_t load_codes(const unsigned char* from, int count) {
  std::uint64_t codes = 0;
  for (int k = 0; 8 * k < bits * count; ++k) codes |= std::uint64_t{from[k]} << 8 * k;
  return codes;
}

template <class Format>
__device__ float load_scale(const unsigned char* payload, std::size_t block, bool is_aligned) {
  if constexpr (Format::kIsMx) return mx_scale<Scalar>(payload[block]);
  if (is_aligned) return reinterpret_cast<const float*>(payload)[block];
  std::uint32_t stored = 0;
  for (int k = 0; k < 4; ++k) stored |= std::uint32_t{payload[4 * block + k]} << 8 * k;
  return __uint_as_float(stored);
}

// The block that an element is in, found by a shift where the length is a power of two.
struct BlockOf {
  std::size_t block_numel;
  int shift;  // -1: not a power of two

  explicit BlockOf(std::size_t block_numel) : block_numel(block_numel), shift(-1) {
    if ((block_numel & (block_numel - 1)) != 0) return;
    for (shift = 0; std::size_t{1} << shift != block_numel;) ++shift;
  }
  __device__ std::size_t operator()(std::size_t i) const { return shift >= 0 ? i >> shift : i / block_numel; }
};

template <class Format, bool is_added>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const __grid_constant__ DequantizeJob job,
                                                              const __grid_constant__ PayloadLayout layout,
                                                              const __grid_constant__ BlockOf block_of, bool is_aligned) {
  constexpr int bits = kCodeBits[static_cast<int>(Format::kFormat)];
  const unsigned char* const codes_begin = job.payload + layout.codes_offset;
  const std::size_t stride = std::size_t{gridDim.x} * kThreads * kWidth;
  for (std::size_t i = (blockIdx.x * std::size_t{kThreads} + threadIdx.x) * kWidth; i < job.numel; i += stride) {
    const bool is_whole = is_aligned && i + (kWarp - lane_of_thread()) * kWidth <= job.numel;  // for all of a warp
    const int count = static_cast<int>(min(job.numel - i, std::size_t{kWidth}));
    const unsigned char* const from = codes_begin + i / 8 * bits;
    const std::uint64_t codes = is_whole ? load_codes_whole<bits>(from) : load_codes<bits>(from, count);
    const float scale = load_scale<Format>(job.payload, block_of(i), is_aligned) * job.factor;
    Elements<kWidth> values = {};
    if constexpr (is_added) {
      if (is_whole) {
        values = load_whole<kWidth>(job.flat + i);
      } else {
        for (int j = 0; j < count; ++j) values.x[j] = job.flat[i + j];
      }
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const std::uint32_t code = static_cast<std::uint32_t>(codes >> (bits * j)) & ((1u << bits) - 1);
      float value;
      if constexpr (Format::kFormat == PayloadFormat::kSign) {
        value = __uint_as_float(__float_as_uint(scale) ^ code << 31);
      } else {
        value = Format::Code::template decode<Scalar>(static_cast<int>(code)) * scale;
      }
      if constexpr (is_added) value = values.x[j] + value;
      values.x[j] = Native<float>::encode<Scalar>(value);
    }
    if (is_whole) {
      store_by_warp(job.flat + i, values);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (j < count) job.flat[i + j] = values.x[j];
      }
    }
  }
}

}  // namespace

int dequantize_cuda(const DequantizeJob& job, void* stream) {
  if (job.numel == 0) return cudaSuccess;
  return visit_format(job.format, [&](auto format) {
    using Format = decltype(format);
    const auto kernel = job.is_added ? &dequantize_kernel<Format, true> : &dequantize_kernel<Format, false>;
    unsigned blocks = 0;
    const cudaError_t error = count_blocks((job.numel + kWidth - 1) / kWidth, kBlocksPerMultiprocessor, &blocks);
    if (error != cudaSuccess) return error;
    return launch_kernel(kernel, blocks, kThreads, stream, job, PayloadLayout(job.format, job.numel, job.block_numel),
                         BlockOf(job.block_numel), is_aligned16(job.flat) && is_aligned16(job.payload));
  });
}

}  // namespace pycomm
