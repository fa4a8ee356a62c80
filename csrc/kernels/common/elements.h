// How each element type lies in memory (Storage), what it is computed in (Value), and the way between the two.
//
// encode() makes every NaN the same one: with two different NaNs among the inputs, which of them an addition returns
// depends on the instruction and its operand order, and ranks or devices would end with different bits.
#pragma once

#include "formats.h"

namespace pycomm {

// Integers, float32, float64: computed in their own type.
template <class T>
struct Native {
  using Storage = T;
  using Value = T;
  template <class W>
  static PYCOMM_HD typename W::template Of<T> decode(typename W::template Of<T> stored) {
    return stored;
  }
  template <class W>
  static PYCOMM_HD typename W::template Of<T> encode(typename W::template Of<T> value) {
    if constexpr (std::is_floating_point_v<T>) {
      constexpr T kNaN = sizeof(T) == 4 ? T(__builtin_nanf("")) : T(__builtin_nan(""));
      return select(differs(value, value), W::template splat<T>(kNaN), value);
    } else {
      return value;
    }
  }
};

// float16 and the 8-bit floats: computed in float32, rounded once.
template <class F>
struct Small {
  using Format = F;
  using Storage = typename F::Storage;
  using Value = float;
  template <class W>
  static PYCOMM_HD typename W::template Of<float> decode(typename W::template Of<Storage> stored) {
    return decode_small<W, F>(W::template convert<typename W::template Of<std::int32_t>>(stored));
  }
  template <class W>
  static PYCOMM_HD typename W::template Of<Storage> encode(typename W::template Of<float> value) {
    const auto canonical = Native<float>::encode<W>(value);
    return W::template convert<typename W::template Of<Storage>>(encode_small<W, F>(canonical));
  }
};

struct BFloat16 {
  using Storage = std::uint16_t;
  using Value = float;
  template <class W>
  static PYCOMM_HD typename W::template Of<float> decode(typename W::template Of<Storage> stored) {
    return decode_bfloat16<W>(W::template convert<typename W::template Of<std::int32_t>>(stored));
  }
  template <class W>
  static PYCOMM_HD typename W::template Of<Storage> encode(typename W::template Of<float> value) {
    return W::template convert<typename W::template Of<Storage>>(round_to_bfloat16<W>(value) >> 16);
  }
};

// Any byte but 0 is read as true; 1 is written for true.
struct Bool {
  using Storage = std::uint8_t;
  using Value = std::uint8_t;
  template <class W>
  static PYCOMM_HD typename W::template Of<Storage> decode(typename W::template Of<Storage> stored) {
    using V = typename W::template Of<Storage>;
    return select(stored != 0, W::template splat<Storage>(1), V(stored & 0));
  }
  template <class W>
  static PYCOMM_HD typename W::template Of<Storage> encode(typename W::template Of<Storage> value) {
    return value;
  }
};

// Complex numbers where the parts mix (PRODUCT); otherwise they are two real numbers.
template <class T>
struct ComplexPair {
  T real, imaginary;
};

template <class T>
struct Complex {
  using Storage = ComplexPair<T>;
  using Value = ComplexPair<T>;
  template <class W>
  static PYCOMM_HD Value decode(Storage stored) {
    return stored;
  }
  template <class W>
  static PYCOMM_HD Storage encode(Value value) {
    return {Native<T>::template encode<W>(value.real), Native<T>::template encode<W>(value.imaginary)};
  }
};

}  // namespace pycomm
