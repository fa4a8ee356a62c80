// Elements of a float32 array as a thread holds them: a few that follow each other, moved 16 bytes at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "block.h"

namespace pycomm {

template <int width>
struct Elements {
  static_assert(width % 4 == 0);
  float x[width];
};

template <int width>
__device__ Elements<width> operator+(const Elements<width>& a, const Elements<width>& b) {
  Elements<width> sum;
#pragma unroll
  for (int j = 0; j < width; ++j) sum.x[j] = a.x[j] + b.x[j];
  return sum;
}

// The elements at `from`, which is aligned to 16 bytes.
template <int width>
__device__ Elements<width> load_whole(const float* from) {
  Elements<width> elements;
#pragma unroll
  for (int j = 0; j < width; j += 4) {
    const float4 loaded = *reinterpret_cast<const float4*>(from + j);
    elements.x[j] = loaded.x, elements.x[j + 1] = loaded.y, elements.x[j + 2] = loaded.z, elements.x[j + 3] = loaded.w;
  }
  return elements;
}

template <int width>
__device__ void store_whole(float* to, const Elements<width>& elements) {
#pragma unroll
  for (int j = 0; j < width; j += 4) {
    const float* const x = elements.x + j;
    *reinterpret_cast<float4*>(to + j) = make_float4(x[0], x[1], x[2], x[3]);
  }
}

// To `to`, by all threads of a warp together, each of which has the elements behind those of the one before.
inline __device__ void store_by_warp(float* to, const Elements<4>& elements) { store_whole(to, elements); }
// Of eight, 16 bytes would lie beside 16 that another instruction writes: half a sector of the L2 cache, which bounds a kernel that
// stores so. So two threads exchange halves first. (H200: dequantize 0.6, quantize with a residual 0.4 to 0.9 of the time.)
inline __device__ void store_by_warp(float* to, const Elements<8>& elements) {
  const bool is_second = threadIdx.x % 2 != 0;
  Elements<4> first, second;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float given = is_second ? elements.x[j] : elements.x[4 + j], taken = __shfl_xor_sync(kAllLanes, given, 1);
    first.x[j] = is_second ? taken : elements.x[j];
    second.x[j] = is_second ? elements.x[4 + j] : taken;
  }
  float* const begin = is_second ? to - 4 : to;
  store_whole(begin, first);
  store_whole(begin + 8, second);
}

// Elements [i, i + 4) of `from`; zeros from `end` on.
inline __device__ Elements<4> load_four(const float* from, std::size_t i, std::size_t end, bool is_aligned) {
  if (is_aligned && i + 4 <= end) return load_whole<4>(from + i);
  Elements<4> four = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (i + j < end) four.x[j] = from[i + j];
  }
  return four;
}

// To [i, i + 4) of `to`, but for those from `end` on.
inline __device__ void store_four(float* to, const Elements<4>& four, std::size_t i, std::size_t end, bool is_aligned) {
  if (is_aligned && i + 4 <= end) return store_whole(to + i, four);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (i + j < end) to[i + j] = four.x[j];
  }
}

}  // namespace pycomm
