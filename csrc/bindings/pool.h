// The caller's threads: kernels that can be cut in ranges run on the pool that Python hands over, torch's own, so that
// torch.set_num_threads rules them too and no core gets two pools.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycomm {

// torch_parallel_for of torch/csrc/stable/c/shim.h: runs body(begin, end, context) over parts of [begin, end).
using ParallelFor = std::int32_t (*)(std::int64_t begin, std::int64_t end, std::int64_t grain,
                                     void (*body)(std::int64_t, std::int64_t, void*), void* context);
extern ParallelFor parallel_for;  // null: none was given

// Elements that are worth a thread.
inline constexpr std::size_t kGrainNumel = 128 * 1024;

// A kernel that reads and writes so many bytes in all writes past the caches, which would not hold them: else it reads the lines that it overwrites.
// Of less they would be there already, and for whoever reads them next: Zen 3 and Zen 5 (32 MiB of L3) dequantize 1 and 2 Mi elements in 0.6 of the time
// by plain stores, 4 Mi in 1.2 and 0.85 of it, 8 Mi in 1.4. (What the system says of the size of a cache does not tell it: a virtual machine has a part.)
inline constexpr std::size_t kStreamedBytes = std::size_t{16} << 20;

// Runs body(first, last) over parts of [0, items), each item being `numel_per_item` elements. The body does not throw.
template <class Body>
void run_in_pool(std::size_t items, std::size_t numel_per_item, Body body) {
  const std::size_t grain = kGrainNumel / numel_per_item + 1;
  if (parallel_for == nullptr || items < 2 * grain) return body(0, items);
  const auto call = [](std::int64_t begin, std::int64_t end, void* context) {
    (*static_cast<Body*>(context))(static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
  };
  const auto end = static_cast<std::int64_t>(items);
  if (parallel_for(0, end, static_cast<std::int64_t>(grain), call, &body) != 0) body(0, items);
}

}  // namespace pycomm
