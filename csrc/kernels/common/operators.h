// The reduction operators, on values (not on stored bits): prepare every input, combine them in order, finish.
#pragma once

#include "elements.h"

namespace pycomm {

// a * b rounded by itself, never fused into a following addition. nvcc fuses by default; the CPU sources are compiled
// with -ffp-contract=off.
template <class V>
PYCOMM_HD V multiply(V a, V b) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<V, float>) return __fmul_rn(a, b);
  if constexpr (std::is_same_v<V, double>) return __dmul_rn(a, b);
#endif
  if constexpr (std::is_integral_v<V>) {
    return static_cast<V>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));  // wraps, at any width
  } else {
    return a * b;
  }
}

// The number of inputs, and its reciprocal if that is exact (a power of two), where multiplying is the faster division.
template <class T>
struct Divisor {
  T count;
  T reciprocal;
  bool is_power_of_two;

  PYCOMM_HD explicit Divisor(int num_inputs)
      : count(static_cast<T>(num_inputs)),
        reciprocal(static_cast<T>(1) / static_cast<T>(num_inputs)),
        is_power_of_two((num_inputs & (num_inputs - 1)) == 0) {}
};

// What an operator does unless it says otherwise.
struct Operator {
  static constexpr bool kScalesInputs = false;
  static constexpr bool kAverages = false;
};

struct Sum : Operator {
  template <class V>
  static PYCOMM_HD V combine(V a, V b) {
    return static_cast<V>(a + b);
  }
};

struct Average : Sum {
  static constexpr bool kAverages = true;
};

struct PremulSum : Sum {
  static constexpr bool kScalesInputs = true;
};

struct Product : Operator {
  template <class V>
  static PYCOMM_HD V combine(V a, V b) {
    return multiply(a, b);
  }
  template <class T>
  static PYCOMM_HD ComplexPair<T> combine(ComplexPair<T> a, ComplexPair<T> b) {
    return {multiply(a.real, b.real) - multiply(a.imaginary, b.imaginary),
            multiply(a.real, b.imaginary) + multiply(a.imaginary, b.real)};
  }
};

// The earlier of two equals stays (0.0 and -0.0 are equal); NaN, once met, stays.
struct Min : Operator {
  template <class V>
  static PYCOMM_HD V combine(V a, V b) {
    return select((b < a) | differs(b, b), b, a);
  }
};

struct Max : Operator {
  template <class V>
  static PYCOMM_HD V combine(V a, V b) {
    return select((b > a) | differs(b, b), b, a);
  }
};

struct And : Operator {
  template <class V>
  static PYCOMM_HD V combine(V a, V b) {
    return static_cast<V>(a & b);
  }
};

struct Or : Operator {
  template <class V>
  static PYCOMM_HD V combine(V a, V b) {
    return static_cast<V>(a | b);
  }
};

struct Xor : Operator {
  template <class V>
  static PYCOMM_HD V combine(V a, V b) {
    return static_cast<V>(a ^ b);
  }
};

}  // namespace pycomm
