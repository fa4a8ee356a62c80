// What lets the mathematics of an element be written once: for one lane or many, for a CPU or a GPU.
//
// A function of common/ that is a template on `W` works on `W::Of<T>`, "T, as wide as W": a plain T for Scalar below,
// a vector register of T for cpu/lanes.h. Arithmetic, comparison and `?:` are spelled the same way for both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

// Always inlined, for a reason beyond speed: cpu/ compiles these functions once for each instruction set. If a copy
// outside a caller existed, the linker would keep one of them for all, and AVX-512 would reach machines without it.
#if defined(__CUDACC__)
#define PYCOMM_HD __host__ __device__ __forceinline__
#else
#define PYCOMM_HD inline __attribute__((always_inline))
#endif

namespace pycomm {

// `c ? a : b`, lane by lane. A name of its own because CUDA and the vectors of GCC agree on nothing shorter.
template <class C, class V>
PYCOMM_HD V select(C c, V a, V b) {
  return c ? a : b;
}

// True in the lanes where `a == b` does not hold; with `b` a copy of `a`, those are the NaNs.
template <class V>
PYCOMM_HD auto differs(V a, V b) {
  return a != b;
}

// The same bits, read as another type of the same size.
template <class To, class From>
PYCOMM_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Added to a float32 below 2^22 in magnitude it leaves the nearest integer in the low bits, ties to even.
inline constexpr float kRoundMagic = 0x1.8p23f;
inline constexpr std::int32_t kRoundMagicBits = 0x4B400000;

// One lane.
struct Scalar {
  template <class T>
  using Of = T;
  static constexpr int kLanes = 1;

  template <class To, class From>
  static PYCOMM_HD To convert(From from) {
    return static_cast<To>(from);
  }
  template <class T>
  static PYCOMM_HD T splat(T value) {
    return value;
  }
  static PYCOMM_HD std::int32_t smaller(std::int32_t a, std::int32_t b) { return a < b ? a : b; }
  static PYCOMM_HD std::int32_t larger(std::int32_t a, std::int32_t b) { return a > b ? a : b; }
  // The magnitude of a float32, as bits. Where one instruction compares magnitudes whatever their signs, the sign may stay; the number
  // that the next two choose of a magnitude and a bound above zero then has it as well.
  static PYCOMM_HD std::int32_t magnitude(std::int32_t bits) { return bits & 0x7FFFFFFF; }
  static PYCOMM_HD std::int32_t smaller_magnitude(std::int32_t a, std::int32_t bound) { return smaller(a, bound); }
  static PYCOMM_HD std::int32_t larger_magnitude(std::int32_t a, std::int32_t bound) { return larger(a, bound); }
  // The nearest integer of |value| < 2^22, ties to even.
  static PYCOMM_HD std::int32_t nearest(float value) { return bit_cast<std::int32_t>(value + kRoundMagic) - kRoundMagicBits; }
  // a * b + c, where the product is exact: so it makes no difference how often it is rounded.
  static PYCOMM_HD float add_exact_product(float a, float b, float c) { return a * b + c; }
};

}  // namespace pycomm
