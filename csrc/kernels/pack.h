// Many tensors <-> one flat bucket, cast and scaled on the way. Allocates nothing, throws nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycomm {

enum class PackType : std::uint8_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
inline constexpr int kPackTypes = 3;
inline constexpr std::size_t kPackItemBytes[kPackTypes] = {4, 2, 2};

// A tensor of the caller. `shape` and `strides` (in elements) have `ndim` entries, and are read only if it is not contiguous.
struct PackPart {
  char* data;
  std::size_t numel;
  PackType type;
  bool is_contiguous;
  int ndim;
  const std::int64_t* shape;
  const std::int64_t* strides;
};

// Elements follow each other in the order of the shape, tensors in the order of `parts`. An element is widened to float32,
// multiplied by `scale` if that is not 1, and rounded once; where neither type nor scale changes it, its bits are kept.
// Bytes moved per element: one item read, one written. `pack` writes the bucket's elements [begin, end), `unpack` reads
// them; calls on disjoint ranges may run at the same time.
struct PackJob {
  const PackPart* parts;
  std::size_t num_parts;
  char* bucket;
  PackType type;
  float scale;
  bool is_streamed;  // non-temporal stores to what is written
  std::size_t begin, end;
};
void pack(const PackJob& job);
void unpack(const PackJob& job);

}  // namespace pycomm
