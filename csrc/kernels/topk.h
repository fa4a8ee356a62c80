// The k elements of largest magnitude. pycomm/ops/topk.py says what is chosen. Allocates nothing, throws nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycomm {

// Room for `topk` on a CPU or a GPU: candidates (an index and a value each); the CPU's magnitudes of a sample; the GPU's state, and
// two counts and two sums for each tile.
inline constexpr std::size_t kTopkSample = 256 * 1024, kTopkStateBytes = 40 * 1024, kTopkTile = 8 * 1024;
inline constexpr std::size_t topk_tiles(std::size_t numel) { return (numel + kTopkTile - 1) / kTopkTile; }
inline constexpr std::size_t topk_candidates(std::size_t numel, std::size_t k) {
  const std::size_t wanted = 2 * k + 64 * 1024;
  return wanted < numel ? wanted : numel;
}
inline constexpr std::size_t topk_workspace_bytes(std::size_t numel, std::size_t k) {
  return 8 * topk_candidates(numel, k) + 4 * (kTopkSample < numel ? kTopkSample : numel) + kTopkStateBytes + 24 * topk_tiles(numel);
}

struct TopkJob {
  std::int32_t* indices;  // (k,), ascending
  float* values;          // (k,)
  const float* flat;      // (numel,)
  float* residual;        // null: none. Else flat + residual is the input, and residual becomes what was not chosen
  void* workspace;        // topk_workspace_bytes(numel, k), aligned to 8 bytes
  std::size_t numel, k;   // 1 <= k <= numel < 2^31
  std::int32_t guess;     // bits of a magnitude that about k elements reach; 0: none
  std::size_t accepted;   // if fewer than k but at least this many reach `guess`, they are chosen; k: exactly k
};

struct TopkResult {
  std::int32_t threshold;  // bits: of the smallest magnitude chosen; of the guess, if that was accepted
  std::size_t selected;    // elements chosen; the other slots hold the last index and 0
  bool is_exact;           // exactly the k largest
};

// Bytes moved per element: 4 read, or with a residual 8 read and 4 written; twice as many are read where more elements than
// there is room for are as large as the k-th, and four or five times as many where neither guess nor sample tells it.
TopkResult topk(const TopkJob& job);

// The first i with indices[i] outside 0 .. numel - 1, or `count`.
std::size_t find_bad_index(const std::int32_t* indices, std::size_t count, std::size_t numel);

// flat[indices[i]] += values[i] * factor, in order. The indices are good.
void scatter_add(float* flat, const std::int32_t* indices, const float* values, std::size_t count, float factor);

// What one payload says: `values[i]` at `indices[i]`.
struct SparsePart {
  const std::int32_t* indices;  // (count,), ascending or equal
  const float* values;
  std::size_t count;
};

// The first i with indices[i] outside 0 .. numel - 1, or below the one before it; or `count`.
std::size_t find_disorder(const SparsePart& part, std::size_t numel);

// flat[begin, end) = the sum of the parts, in their order; 0 where none says anything. The indices are good. Uses `parts`
// up: they begin behind `end` then.
// Bytes moved per element: 4 written, past the caches if `is_streamed` (then a store fence ends it).
void scatter_sum(float* flat, std::size_t begin, std::size_t end, SparsePart* parts, std::size_t num_parts,
                 bool is_streamed);

}  // namespace pycomm
