// The bits of floating-point formats narrower than float32: decode to float32 and encode from it, bit for bit as torch
// casts. Branch-free integer arithmetic (and one addition, which rounds subnormals), so that it vectorises.
#pragma once

#include "portable.h"

namespace pycomm {

// What a value too large for the format becomes.
enum class Overflow {
  kInfinity,     // IEEE: infinities and NaNs fill the highest exponent
  kSaturate,     // "fn": no infinity, only all-ones is NaN; the largest finite number (torch before 2.13 gave NaN)
  kUnsignedNaN,  // "fnuz": no infinity, no negative zero; NaN, whose only code would be that of -0
};

// A format of 1 sign bit, `exponent_bits` and `mantissa_bits`, with the code of its quiet NaN (sign bit clear, but for
// fnuz).
template <int exponent_bits, int mantissa_bits, int bias, Overflow overflow, unsigned nan_code>
struct Format {
  static constexpr int kExponentBits = exponent_bits, kMantissaBits = mantissa_bits, kBias = bias;
  static constexpr Overflow kOverflow = overflow;
  static constexpr int kNaN = static_cast<int>(nan_code);
  static constexpr int kSignBit = 1 << (exponent_bits + mantissa_bits);
  static constexpr int kShift = 23 - mantissa_bits;      // float32's mantissa is longer by this
  static constexpr int kRebias = (127 - bias) << 23;     // float32's exponent is larger by this, in place
  static constexpr int kMinNormal = (128 - bias) << 23;  // float32 bits of the smallest normal number
  static constexpr int kInfinity = ((1 << exponent_bits) - 1) << mantissa_bits;  // if kOverflow is kInfinity
  static constexpr int kQuantumExponent = 1 - bias - mantissa_bits;  // subnormals are multiples of 2 to this power
  using Storage = std::conditional_t<exponent_bits + mantissa_bits == 15, std::uint16_t, std::uint8_t>;
};

using Float16Format = Format<5, 10, 15, Overflow::kInfinity, 0x7E00>;
using E5M2Format = Format<5, 2, 15, Overflow::kInfinity, 0x7F>;
using E4M3FNFormat = Format<4, 3, 7, Overflow::kSaturate, 0x7F>;
using E5M2FNUZFormat = Format<5, 2, 16, Overflow::kUnsignedNaN, 0x80>;
using E4M3FNUZFormat = Format<4, 3, 8, Overflow::kUnsignedNaN, 0x80>;

// The float32 `2^exponent`, as bits.
PYCOMM_HD constexpr int power_of_two_bits(int exponent) { return (127 + exponent) << 23; }

// code (zero-extended to 32 bits) -> float32, exact.
template <class W, class F>
PYCOMM_HD typename W::template Of<float> decode_small(typename W::template Of<std::int32_t> code) {
  using I = typename W::template Of<std::int32_t>;
  using U = typename W::template Of<std::uint32_t>;
  using V = typename W::template Of<float>;
  const I magnitude = code & (F::kSignBit - 1);
  const U sign = bit_cast<U>(code & F::kSignBit) << (31 - F::kExponentBits - F::kMantissaBits);

  I bits = (magnitude << F::kShift) + F::kRebias;
  const float quantum = bit_cast<float>(power_of_two_bits(F::kQuantumExponent));
  const V subnormal = W::template convert<V>(magnitude) * quantum;
  bits = select(magnitude < (1 << F::kMantissaBits), bit_cast<I>(subnormal), bits);

  constexpr int kNaNBits = 0x7FC00000;
  if constexpr (F::kOverflow == Overflow::kInfinity) {
    bits = select(magnitude >= F::kInfinity, (magnitude << F::kShift) | 0x7F800000, bits);
  } else if constexpr (F::kOverflow == Overflow::kSaturate) {
    bits = select(magnitude == F::kNaN, W::template splat<std::int32_t>(kNaNBits), bits);
  } else {
    bits = select(code == F::kNaN, W::template splat<std::int32_t>(kNaNBits), bits);
  }
  return bit_cast<V>(bit_cast<U>(bits) | sign);
}

// float32 -> code in the low bits, rounded to nearest, ties to even. NaN becomes the format's quiet NaN with its sign.
template <class W, class F>
PYCOMM_HD typename W::template Of<std::int32_t> encode_small(typename W::template Of<float> value) {
  using I = typename W::template Of<std::int32_t>;
  using V = typename W::template Of<float>;
  const I bits = bit_cast<I>(value);
  const I magnitude = bits & 0x7FFFFFFF;
  const I sign = (bits >> (31 - F::kExponentBits - F::kMantissaBits)) & F::kSignBit;

  constexpr int kHalf = (1 << (F::kShift - 1)) - 1;
  I code = (magnitude - F::kRebias + kHalf + ((magnitude >> F::kShift) & 1)) >> F::kShift;
  // 2^23 quanta: at that size float32's last bit is worth one quantum, so the addition rounds to whole quanta.
  constexpr int kMagicBits = power_of_two_bits(F::kQuantumExponent + 23);
  const V magic = bit_cast<V>(W::template splat<std::int32_t>(kMagicBits));
  const I subnormal = bit_cast<I>(V(bit_cast<V>(magnitude) + magic)) - kMagicBits;
  code = select(magnitude < F::kMinNormal, subnormal, code);

  const auto is_nan = magnitude > 0x7F800000;
  if constexpr (F::kOverflow == Overflow::kUnsignedNaN) {
    const I with_sign = select(code == 0, code, code | sign);
    return select((code >= F::kSignBit) | is_nan, W::template splat<std::int32_t>(F::kNaN), with_sign);
  } else {
    constexpr int kLargest = F::kOverflow == Overflow::kInfinity ? F::kInfinity : F::kNaN - 1;
    code = select(code > kLargest, W::template splat<std::int32_t>(kLargest), code);
    return select(is_nan, W::template splat<std::int32_t>(F::kNaN), code) | sign;
  }
}

// bfloat16 is the upper half of a float32.
template <class W>
PYCOMM_HD typename W::template Of<float> decode_bfloat16(typename W::template Of<std::int32_t> code) {
  return bit_cast<typename W::template Of<float>>(bit_cast<typename W::template Of<std::uint32_t>>(code) << 16);
}

// Rounded to nearest, ties to even: the code is in the upper half of the answer, the lower half is noise. Every NaN
// becomes 0x7FC0.
template <class W>
PYCOMM_HD typename W::template Of<std::uint32_t> round_to_bfloat16(typename W::template Of<float> value) {
  using U = typename W::template Of<std::uint32_t>;
  const U bits = bit_cast<U>(value);
  const U rounded = bits + 0x7FFFu + (bits >> 16 & 1u);
  return select(differs(value, value), W::template splat<std::uint32_t>(0x7FC00000u), rounded);
}

}  // namespace pycomm
