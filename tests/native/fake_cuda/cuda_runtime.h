// Enough of CUDA to run this project's kernels on a CPU, to find mistakes where there is no GPU: blocks one after the
// other, each thread of a block a fiber of its own, switched at barriers and shuffles only, in an order drawn anew each
// time, so that a missing barrier shows. It says nothing about speed, nor about what only real hardware does.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  explicit dim3(unsigned x) : x(x) {}
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace fake_cuda {

constexpr int kWarp = 32;
constexpr std::size_t kStack = 32 * 1024;
constexpr std::size_t kMostThreads = 1024;  // of a block

struct Index {
  unsigned x = 0;
};

inline Index thread_index, block_index, grid_dim;

// The threads of the block that runs. A fiber is one thread of every block, and one switches to the next by itself.
struct Block {
  ucontext_t launcher;
  std::vector<ucontext_t> contexts;
  std::vector<std::vector<char>> stacks;
  std::vector<char> is_done;
  std::vector<std::pair<const int*, int>> barriers;  // that a thread waits for, and what had passed when it came
  std::function<void()> body;
  std::vector<int> order;  // in which threads have their turns; `turn` is the next one
  std::size_t turn = 0;
  int current = 0, running = 0;
  int arrived = 0, generation = 0;                              // of the barrier of the block
  std::vector<int> warp_arrived, warp_generation, warp_running;  // and of those of the warps
  std::vector<std::uint64_t> slots;                              // what the lanes show each other, by turns in two
  std::vector<char> turns;
  std::mt19937 generator{3};

  void wait(int& count, int& passed, const int& members) {
    const int before = passed;
    if (++count == members) {
      count = 0;
      ++passed;
      return;
    }
    barriers[current] = {&passed, before};
    yield(contexts[current]);
  }

  void end() {
    is_done[current] = true;
    --running;
    --warp_running[current / kWarp];
    if (arrived != 0 && arrived == running) arrived = 0, ++generation;  // a thread that has returned is not waited for
    if (running != 0)
      yield(contexts[current]);
    else
      swapcontext(&contexts[current], &launcher);
  }

  // Leaves `from` for a thread that can run, which may be the same.
  void yield(ucontext_t& from) {
    const int thread = next();
    barriers[thread] = {nullptr, 0};
    current = thread;
    thread_index.x = static_cast<unsigned>(thread);
    if (&from != &contexts[thread]) swapcontext(&from, &contexts[thread]);
  }

  bool can_run(int thread) const {
    const auto [passed, before] = barriers[thread];
    return !is_done[thread] && (passed == nullptr || *passed != before);
  }

  int next() {
    for (std::size_t looked = 0; looked < 2 * order.size(); ++looked) {
      if (turn == order.size()) {
        std::shuffle(order.begin(), order.end(), generator);
        turn = 0;
      }
      if (const int thread = order[turn++]; can_run(thread)) return thread;
    }
    std::fprintf(stderr, "block %u: %d threads wait at barriers that the others never come to\n", block_index.x, running);
    std::abort();
  }
};
inline Block block;

inline void enter() {
  for (;;) {
    block.body();
    block.end();
  }
}

inline void run_block(int threads, const std::function<void()>& body) {
  const int warps = (threads + kWarp - 1) / kWarp;
  block.is_done.assign(threads, false);
  block.barriers.assign(threads, {nullptr, 0});
  block.warp_arrived.assign(warps, 0), block.warp_generation.assign(warps, 0), block.warp_running.assign(warps, 0);
  block.slots.assign(2 * threads, 0);
  block.turns.assign(threads, 0);
  block.body = body, block.running = threads, block.arrived = block.generation = 0;
  block.order.resize(threads), block.turn = threads;
  for (int thread = 0; thread < threads; ++thread) {
    block.order[thread] = thread;
    ++block.warp_running[thread / kWarp];
  }
  if (block.contexts.empty()) {
    block.contexts.resize(kMostThreads);  // once: a context has pointers into itself
    block.stacks.resize(kMostThreads, std::vector<char>(kStack));
    for (std::size_t thread = 0; thread < kMostThreads; ++thread) {
      ucontext_t& context = block.contexts[thread];
      getcontext(&context);
      context.uc_stack.ss_sp = block.stacks[thread].data();
      context.uc_stack.ss_size = kStack;
      makecontext(&context, enter, 0);
    }
  }
  block.yield(block.launcher);
}

inline void sync_warp() {
  const int warp = block.current / kWarp;
  block.wait(block.warp_arrived[warp], block.warp_generation[warp], block.warp_running[warp]);
}

// Shows `value` to the warp; returns a function of a lane, that says what that one showed. Of two slots a thread, one is
// still read while the other is written: a lane is at most one exchange ahead.
template <class T>
auto show(T value) {
  static_assert(sizeof(T) <= 8);
  const int thread = block.current, turn = block.turns[thread] ^= 1;
  std::memcpy(&block.slots[2 * thread + turn], &value, sizeof(T));
  sync_warp();
  return [first = thread - thread % kWarp, turn](int lane) {
    T shown;
    std::memcpy(&shown, &block.slots[2 * (first + lane) + turn], sizeof(T));
    return shown;
  };
}

// Shows `value` to the warp and returns that of a lane; out of range, the own one.
template <class T>
T exchange(T value, int lane_from, int lane, int width) {
  const auto shown_by = show(value);
  const int base = lane / width * width;
  return lane_from >= base && lane_from < base + width ? shown_by(lane_from) : value;
}
inline int lane() { return block.current % kWarp; }

}  // namespace fake_cuda

#define threadIdx (fake_cuda::thread_index)
#define blockIdx (fake_cuda::block_index)
#define gridDim (fake_cuda::grid_dim)

inline void __syncthreads() {
  fake_cuda::block.wait(fake_cuda::block.arrived, fake_cuda::block.generation, fake_cuda::block.running);
}
inline void __threadfence() {}
template <class T>
T __shfl_sync(unsigned, T value, int from, int width = 32) {
  return fake_cuda::exchange(value, fake_cuda::lane() / width * width + from, fake_cuda::lane(), width);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int step, int width = 32) {
  return fake_cuda::exchange(value, fake_cuda::lane() - step, fake_cuda::lane(), width);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int step, int width = 32) {
  return fake_cuda::exchange(value, fake_cuda::lane() + step, fake_cuda::lane(), width);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
  return fake_cuda::exchange(value, fake_cuda::lane() ^ mask, fake_cuda::lane(), width);
}
inline unsigned __ballot_sync(unsigned, bool holds) {
  const auto shown_by = fake_cuda::show<unsigned>(holds);
  unsigned ballot = 0;
  for (int lane = 0; lane < fake_cuda::kWarp; ++lane) ballot |= shown_by(lane) << lane;
  return ballot;
}
inline int __any_sync(unsigned mask, bool holds) { return __ballot_sync(mask, holds) != 0; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  *to = before + value;
  return before;
}
inline unsigned atomicOr(unsigned* to, unsigned value) {
  const unsigned before = *to;
  *to |= value;
  return before;
}
template <class To, class From>
To reinterpret_bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline int __float_as_int(float value) { return reinterpret_bits<int>(value); }
inline float __int_as_float(int bits) { return reinterpret_bits<float>(bits); }
inline unsigned __float_as_uint(float value) { return reinterpret_bits<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return reinterpret_bits<float>(bits); }
using std::max;
using std::min;

// -- the runtime ---------------------------------------------------------------------------------------------------

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline int fake_multiprocessors = 2;  // few, so that a block has several rounds
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = fake_multiprocessors, cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "success" : "invalid value"; }
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
  return std::memset(to, value, bytes), cudaSuccess;
}

template <class... Parameters, std::size_t... i>
void fake_call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<i...>) {
  kernel(*static_cast<std::remove_cv_t<Parameters>*>(arguments[i])...);
}

template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 threads, void** arguments, std::size_t,
                             cudaStream_t) {
  fake_cuda::grid_dim.x = grid.x;
  for (unsigned index = 0; index < grid.x; ++index) {
    fake_cuda::block_index.x = index;
    fake_cuda::run_block(static_cast<int>(threads.x),
                         [&] { fake_call(kernel, arguments, std::index_sequence_for<Parameters...>{}); });
  }
  return cudaSuccess;
}
