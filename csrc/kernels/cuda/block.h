// What the threads of a warp, of a block and of a grid tell each other. All threads of the warp or block call these together.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launch.h"

namespace pycomm {

inline constexpr int kWarp = 32, kWarpsOfBlock = kThreads / kWarp;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

inline __device__ unsigned lane_of_thread() { return threadIdx.x % kWarp; }
// Of a grid of blocks of kThreads.
inline __device__ unsigned warp_of_thread() { return blockIdx.x * kWarpsOfBlock + threadIdx.x / kWarp; }
inline __device__ unsigned warps_of_grid() { return gridDim.x * kWarpsOfBlock; }

// The sum of the lanes before this one; `total` becomes that of all.
template <class T>
__device__ T sum_before_in_warp(T value, T* total) {
  T sum = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane_of_thread() >= static_cast<unsigned>(step)) sum += other;
  }
  *total = __shfl_sync(kAllLanes, sum, kWarp - 1);
  return sum - value;
}

// The sum of the threads before this one, in a block of `threads`; `total` becomes that of all.
template <int threads, class T>
__device__ T sum_before_in_block(T value, T* total) {
  __shared__ T of_warp[threads / kWarp];
  const int own = static_cast<int>(threadIdx.x) / kWarp;
  T of_lanes = 0, all = 0;
  T before = sum_before_in_warp(value, &of_lanes);
  if (lane_of_thread() == 0) of_warp[own] = of_lanes;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < threads / kWarp; ++warp) {
    if (warp < own) before += of_warp[warp];
    all += of_warp[warp];
  }
  __syncthreads();  // before `of_warp` is used again
  *total = all;
  return before;
}

// Says to all threads of the block that gets here last that they are it; what the others wrote is then visible.
inline __device__ bool is_last_block(std::uint32_t* finished) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(finished, 1u) + 1 == gridDim.x;
  __syncthreads();
  if (is_last) __threadfence();
  return is_last;
}

}  // namespace pycomm
