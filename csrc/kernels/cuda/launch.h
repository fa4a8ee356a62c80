// What the CUDA kernels' launches have in common.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace pycomm {

inline constexpr int kThreads = 256;

inline __host__ __device__ bool is_aligned16(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

// Enough blocks of kThreads for `threads`, at most `per_multiprocessor` for each multiprocessor of the current device.
inline cudaError_t count_blocks(std::size_t threads, int per_multiprocessor, unsigned* blocks) {
  int device = 0, multiprocessors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  const std::size_t needed = (threads + kThreads - 1) / kThreads;
  const std::size_t most = static_cast<std::size_t>(multiprocessors) * static_cast<std::size_t>(per_multiprocessor);
  *blocks = static_cast<unsigned>(std::max<std::size_t>(1, std::min(needed, most)));
  return cudaSuccess;
}

// The type itself, where it is not to be deduced.
template <class T>
struct Same {
  using Type = T;
};

// Queues kernel<<<blocks, threads, 0, stream>>>(arguments...) in plain C++.
template <class... Parameters>
cudaError_t launch_kernel(void (*kernel)(Parameters...), unsigned blocks, int threads, void* stream,
                          typename Same<Parameters>::Type... arguments) {
  void* addresses[] = {&arguments...};
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(static_cast<unsigned>(threads)), addresses, 0,
                          static_cast<cudaStream_t>(stream));
}

}  // namespace pycomm
