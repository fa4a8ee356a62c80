// Elements of a float32 array as a thread holds them: a few that follow each other, moved 16 bytes at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

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
