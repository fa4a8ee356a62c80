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
