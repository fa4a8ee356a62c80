// The mathematics of quantization, written once: the scale of a block, and the code of an element and back. What is
// computed, and why a payload is the same on every device, is told in pycomm/ops/quantize.py. Everything rounds as
// IEEE float32, each operation by itself (no contraction, no flush to zero).
#pragma once

#include "formats.h"
#include "operators.h"
#include "payload.h"

namespace pycomm {

inline constexpr int kNaNBits = 0x7FC00000;
inline constexpr int kInfinityBits = 0x7F800000;
inline constexpr int kTinyBits = power_of_two_bits(-100);  // a block whose magnitudes are all smaller is sent as zeros

// What a block is encoded with, or as many blocks as W has lanes. For a block of zeros `scale` and `inverse` are 0.
template <class W>
struct BlockScale {
  typename W::template Of<float> scale;           // decoded = code * scale; NaN: the block is not finite, all its codes are 0
  typename W::template Of<float> inverse;         // code = x * inverse, rounded
  typename W::template Of<std::uint32_t> stored;  // the float32's bits, or the mx byte
};

// -- small floats whose input is at most a little above the largest: no NaN, no infinity ------------------------------

using E2M1Format = Format<2, 1, 1, Overflow::kSaturate, 8>;  // 0 .5 1 1.5 2 3 4 6; four bits have no code for NaN

// 16 random bits (in 0..65535) -> -0.5 .. 0.5, symmetric around 0, exact.
template <class W>
PYCOMM_HD typename W::template Of<float> dither(typename W::template Of<std::int32_t> random) {
  return W::template convert<typename W::template Of<float>>(random * 2 - 65535) * 0x1p-17f;
}

// `largest` in -largest..largest, `bits` wide.
template <int bits, int largest>
struct IntCode {
  static constexpr int kBits = bits;
  static constexpr bool kHasSignBit = false;  // two's complement
  static constexpr float kLargest = largest;

  template <class W>
  struct Encoded {
    typename W::template Of<std::int32_t> code;
    PYCOMM_HD typename W::template Of<std::int32_t> with_sign() const { return code; }
    PYCOMM_HD typename W::template Of<float> value() const { return W::template convert<typename W::template Of<float>>(code); }
  };

  template <class W, bool stochastic>
  static PYCOMM_HD Encoded<W> encode(typename W::template Of<float> value,
                                     [[maybe_unused]] typename W::template Of<std::int32_t> random) {
    if constexpr (stochastic) {
      value = value + dither<W>(random);
      value = select(value > kLargest, W::template splat<float>(kLargest), value);
      value = select(value < -kLargest, W::template splat<float>(-kLargest), value);
    }
    return {W::nearest(value)};
  }

  template <class W>
  static PYCOMM_HD typename W::template Of<float> decode(typename W::template Of<std::int32_t> code) {
    return W::template convert<typename W::template Of<float>>((code << (32 - bits)) >> (32 - bits));
  }
};

// [Note: rounding by an addition]
// A float32 of 2^23 quanta or a little more has a last bit that is worth one quantum: what is added to it is rounded to
// whole quanta, to nearest, ties to even, and their number lies in the low bits. A small float's quantum is the last bit of
// its mantissa, so 2^kShift times the number's own power of two does it; below the normal numbers the quantum stays.
// The sum is the code in two parts then: the quanta, and in its own exponent, which is larger by a constant, the number's. What
// makes up for the constant is added as quanta too: a negative number of them, as the low 16 bits have it. (It is even, which
// leaves ties to even as they are.) So the code is low half + high half * 2^kMantissaBits / 128. All of it holds for magnitudes; a
// sign that W::magnitude() leaves passes through, as the power has it too.
//
// What is divided by a scale of float32 is rounded to the largest number at most, the block's amax to that very number. A
// power of two may leave more, where no larger one is a scale: then a code `saturates`.
template <class F, bool saturates>
struct FloatCode {
  using Bounded = FloatCode<F, false>;  // of what is known not to saturate
  static constexpr int kExponentBits = F::kExponentBits;
  static constexpr int kMantissaBits = F::kMantissaBits;
  static constexpr int kBits = F::kExponentBits + F::kMantissaBits + 1;
  static constexpr bool kHasSignBit = true;
  static constexpr int kLargestCode = F::kOverflow == Overflow::kInfinity ? F::kInfinity - 1 : F::kNaN - 1;
  static constexpr int kLargestBits = (kLargestCode << F::kShift) + F::kRebias;
  static constexpr float kLargest = (1 + (kLargestCode & ((1 << F::kMantissaBits) - 1)) / float(1 << F::kMantissaBits)) *
                                    (1 << ((kLargestCode >> F::kMantissaBits) - F::kBias));

  template <class W>
  struct Encoded {
    typename W::template Of<std::int32_t> sum;   // the code but for its sign, in two halves: [Note: rounding by an addition]
    typename W::template Of<std::int32_t> bits;  // whose highest is the sign
    typename W::template Of<float> magnitude;    // of which the sign does not matter, nor of the sum: W::magnitude()
    // The code in the low bits; noise above.
    PYCOMM_HD typename W::template Of<std::int32_t> with_sign() const {
      using I = typename W::template Of<std::int32_t>;
      const auto halves = bit_cast<typename W::template Of<std::uint32_t>>(sum);
      const I code = bit_cast<I>(halves + (halves >> F::kShift));
      return code | ((bits >> (31 - F::kExponentBits - F::kMantissaBits)) & F::kSignBit);
    }
    PYCOMM_HD typename W::template Of<float> value() const {
      using I = typename W::template Of<std::int32_t>;
      return bit_cast<typename W::template Of<float>>(bit_cast<I>(magnitude) | (bits & ~0x7FFFFFFF));
    }
  };

  template <class W, bool stochastic>
  static PYCOMM_HD Encoded<W> encode(typename W::template Of<float> value,
                                     [[maybe_unused]] typename W::template Of<std::int32_t> random) {
    using I = typename W::template Of<std::int32_t>;
    const I bits = bit_cast<I>(value);
    if constexpr (stochastic) {
      const I code = round_up_at<W>(bits & 0x7FFFFFFF, random);
      return {code | (W::magnitude(bits) & ~0x7FFFFFFF), bits, decode_small<W, F>(code)};
    } else {
      return round<W>(bits);
    }
  }

  template <class W>
  static PYCOMM_HD typename W::template Of<float> decode(typename W::template Of<std::int32_t> code) {
    return decode_small<W, F>(code);
  }

 private:
  // To nearest: [Note: rounding by an addition].
  template <class W>
  static PYCOMM_HD Encoded<W> round(typename W::template Of<std::int32_t> bits) {
    using I = typename W::template Of<std::int32_t>;
    using V = typename W::template Of<float>;
    constexpr int kTooLarge = (F::kMinNormal >> F::kShift) + (F::kShift << F::kMantissaBits);
    constexpr int kAdded = (1 << 16) - kTooLarge;
    static_assert(kAdded % 2 == 0 && kTooLarge < 1 << 15);
    I magnitude = W::magnitude(bits);
    if constexpr (saturates) magnitude = W::smaller_magnitude(magnitude, kLargestBits);
    const I power = W::larger_magnitude(magnitude & ~0x7FFFFF, F::kMinNormal);
    const float factor = bit_cast<float>(power_of_two_bits(F::kShift) + kAdded);
    const V sum = W::add_exact_product(bit_cast<V>(power), W::template splat<float>(factor), bit_cast<V>(magnitude));
    return {bit_cast<I>(sum), bits, W::add_exact_product(bit_cast<V>(power), W::template splat<float>(-factor), sum)};
  }

  // Up by chance.
  template <class W>
  static PYCOMM_HD typename W::template Of<std::int32_t> round_up_at(typename W::template Of<std::int32_t> magnitude,
                                                                     typename W::template Of<std::int32_t> random) {
    using I = typename W::template Of<std::int32_t>;
    using V = typename W::template Of<float>;
    constexpr int kMagicBits = power_of_two_bits(F::kQuantumExponent + 23) + (1 << 22);
    const V magic = bit_cast<V>(W::template splat<std::int32_t>(kMagicBits));
    const I up = (random << (F::kShift - 16)) + ((1 << (F::kShift - 17)) - F::kRebias);
    const float quantum = bit_cast<float>(power_of_two_bits(F::kQuantumExponent));
    const V quanta = bit_cast<V>(magnitude) + dither<W>(random) * quantum + magic;
    const I code = select(magnitude < F::kMinNormal, bit_cast<I>(quanta) - kMagicBits, I((magnitude + up) >> F::kShift));
    return W::smaller(code, W::template splat<std::int32_t>(kLargestCode));
  }
};

// -- the scale of a block ---------------------------------------------------------------------------------------------

// The largest float32 whose product with `largest` is finite, for sure.
PYCOMM_HD constexpr float scale_bound(float largest) {
  return static_cast<float>(0x1.fffffep127 / static_cast<double>(largest) * (1 - 0x1p-24));
}

template <class W>
PYCOMM_HD BlockScale<W> make_scale(typename W::template Of<std::int32_t> amax, float largest) {
  using V = typename W::template Of<float>;
  using U = typename W::template Of<std::uint32_t>;
  const V zero = W::template splat<float>(0.0f), bound = W::template splat<float>(scale_bound(largest));
  V scale = bit_cast<V>(amax) / largest;
  scale = select(scale < bound, scale, bound);
  V inverse = 1.0f / scale;
  scale = select(amax < kTinyBits, zero, scale);
  inverse = select(amax < kTinyBits, zero, inverse);
  scale = select(amax >= kInfinityBits, bit_cast<V>(W::template splat<std::int32_t>(kNaNBits)), scale);
  return {scale, inverse, bit_cast<U>(scale)};
}

template <class W>
PYCOMM_HD typename W::template Of<float> mx_scale(typename W::template Of<std::uint32_t> stored) {
  using U = typename W::template Of<std::uint32_t>;
  const U bits = select(stored == 0, W::template splat<std::uint32_t>(0x00400000), U(stored << 23));
  return bit_cast<typename W::template Of<float>>(select(stored == 255, W::template splat<std::uint32_t>(kNaNBits), bits));
}

// The bits of the largest amax for which there is a power of two that leaves no code to saturate: make_mx_scale()'s bound.
PYCOMM_HD constexpr int largest_mx_amax(int largest_bits) { return 254 << 23 | (largest_bits & 0x7FFFFF); }

template <class W>
PYCOMM_HD BlockScale<W> make_mx_scale(typename W::template Of<std::int32_t> amax, int largest_bits) {
  using I = typename W::template Of<std::int32_t>;
  using U = typename W::template Of<std::uint32_t>;
  using V = typename W::template Of<float>;
  constexpr int kMantissa = 0x7FFFFF;
  const I one = W::template splat<std::int32_t>(1), zero = W::template splat<std::int32_t>(0);
  const I above = select((amax & kMantissa) > (largest_bits & kMantissa), one, zero);
  const I bound = W::template splat<std::int32_t>(254 - (largest_bits >> 23));  // largest * scale is to be finite
  const I exponent = W::smaller((amax >> 23) - (largest_bits >> 23) + above, bound);
  I stored = exponent + 127;
  V inverse = bit_cast<V>((127 - exponent) << 23);
  stored = select(amax < kTinyBits, zero, stored);
  inverse = select(amax < kTinyBits, W::template splat<float>(0.0f), inverse);
  stored = select(amax >= kInfinityBits, W::template splat<std::int32_t>(255), stored);
  return {mx_scale<W>(bit_cast<U>(stored)), inverse, bit_cast<U>(stored)};
}

// -- the formats ------------------------------------------------------------------------------------------------------

template <PayloadFormat format, class CodeType>
struct ScaledFormat {
  static constexpr PayloadFormat kFormat = format;
  static constexpr bool kIsMx = is_mx(format);
  using Code = CodeType;
  // `reach` is the largest magnitude, as bits.
  template <class W>
  static PYCOMM_HD BlockScale<W> scale(typename W::template Of<std::int32_t> reach) {
    if constexpr (kIsMx) {
      return make_mx_scale<W>(reach, Code::kLargestBits);
    } else {
      return make_scale<W>(reach, Code::kLargest);
    }
  }
};
struct SignFormat {
  static constexpr PayloadFormat kFormat = PayloadFormat::kSign;
  static constexpr bool kIsMx = false;
  // `reach` is the mean magnitude, as bits: a sum, in the order of [Note: lanes of a sum], by the number of elements.
  template <class W>
  static PYCOMM_HD BlockScale<W> scale(typename W::template Of<std::int32_t> reach) {
    using I = typename W::template Of<std::int32_t>;
    const I bits = select(reach >= kInfinityBits, W::template splat<std::int32_t>(kNaNBits), reach);
    return {bit_cast<typename W::template Of<float>>(bits), W::template splat<float>(0.0f),
            bit_cast<typename W::template Of<std::uint32_t>>(bits)};
  }
};

// Calls visit(Format{}).
template <class Visit>
constexpr auto visit_format(PayloadFormat format, Visit visit) {
  switch (format) {
    case PayloadFormat::kInt8: return visit(ScaledFormat<PayloadFormat::kInt8, IntCode<8, 127>>{});
    case PayloadFormat::kInt4: return visit(ScaledFormat<PayloadFormat::kInt4, IntCode<4, 7>>{});
    case PayloadFormat::kTernary: return visit(ScaledFormat<PayloadFormat::kTernary, IntCode<2, 1>>{});
    case PayloadFormat::kFp8E4M3: return visit(ScaledFormat<PayloadFormat::kFp8E4M3, FloatCode<E4M3FNFormat, false>>{});
    case PayloadFormat::kFp8E5M2: return visit(ScaledFormat<PayloadFormat::kFp8E5M2, FloatCode<E5M2Format, false>>{});
    case PayloadFormat::kMxfp8: return visit(ScaledFormat<PayloadFormat::kMxfp8, FloatCode<E4M3FNFormat, true>>{});
    case PayloadFormat::kMxfp4: return visit(ScaledFormat<PayloadFormat::kMxfp4, FloatCode<E2M1Format, true>>{});
    case PayloadFormat::kSign: break;
  }
  return visit(SignFormat{});
}

// [Note: lanes of a sum]
// A float sum depends on its order, so the order is part of the format: element i of a block is added to lane i % 128, in
// turn; then lane l and lane l + 64 are added, l and l + 32, ..., until one is left. 128 lanes are four of a warp's 32
// threads, or eight registers of AVX-512.
inline constexpr int kSumLanes = 128;

}  // namespace pycomm
