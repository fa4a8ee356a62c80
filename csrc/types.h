// The words that cross every native layer. The codes are those of pycomm/types.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycomm {

enum class DType : std::uint8_t {
  kUInt8 = 0, kInt8 = 1, kUInt16 = 2, kInt16 = 3, kUInt32 = 4, kInt32 = 5, kUInt64 = 6, kInt64 = 7,
  kBool = 8, kFloat16 = 9, kBFloat16 = 10, kFloat32 = 11, kFloat64 = 12, kComplex64 = 13, kComplex128 = 14,
  kFloat8E4M3FN = 15, kFloat8E5M2 = 16, kFloat8E4M3FNUZ = 17, kFloat8E5M2FNUZ = 18,
};
inline constexpr int kDTypes = 19;

enum class ReduceOp : std::uint8_t {
  kSum = 0, kProduct = 1, kMin = 2, kMax = 3, kBand = 4, kBor = 5, kBxor = 6, kAvg = 7, kPremulSum = 8,
};
inline constexpr int kReduceOps = 9;

inline constexpr std::size_t kItemBytes[kDTypes] = {1, 1, 2, 2, 4, 4, 8, 8, 1, 2, 2, 4, 8, 8, 16, 1, 1, 1, 1};

inline constexpr std::size_t item_bytes(DType dtype) { return kItemBytes[static_cast<int>(dtype)]; }

}  // namespace pycomm
