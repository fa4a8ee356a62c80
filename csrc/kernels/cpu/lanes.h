// Several lanes of a type in one vector register, by GCC's vector extensions: common/'s W for the CPU.
// A part of reduce_body.h, which see; PYCOMM_ISA names the instruction set.

// What is in the namespace of an instruction set is no other one's, inlined or not. Without optimisation, as under the
// sanitizers, a function for each is compiled in a third of the time that a copy in every caller takes.
#ifdef __OPTIMIZE__
#define PYCOMM_INLINE __attribute__((always_inline))  // for lambdas
#else
#define PYCOMM_INLINE
#undef PYCOMM_HD
#define PYCOMM_HD inline
#endif

namespace pycomm::PYCOMM_ISA {

template <class T, int lanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(lanes * sizeof(T))));
};

// From, lane by lane as a number, to To. The intrinsics are what GCC 12 does not find by itself, between codes of 8 or
// 16 bits and int32. (For 512 bits the maskz forms, because it warns of the plain ones.)
template <class To, class From>
PYCOMM_HD To convert_lanes(From from) {
#if PYCOMM_VECTOR_BYTES == 64
  constexpr bool widens = std::is_same_v<To, typename VectorOf<std::int32_t, 16>::type>;
  if constexpr (widens && sizeof(From) == 32) {
    return bit_cast<To>(_mm512_maskz_cvtepu16_epi32(0xFFFF, bit_cast<__m256i>(from)));
  }
  if constexpr (widens && std::is_same_v<From, typename VectorOf<std::int8_t, 16>::type>) {
    return bit_cast<To>(_mm512_maskz_cvtepi8_epi32(0xFFFF, bit_cast<__m128i>(from)));
  } else if constexpr (widens && sizeof(From) == 16) {
    return bit_cast<To>(_mm512_maskz_cvtepu8_epi32(0xFFFF, bit_cast<__m128i>(from)));
  }
  if constexpr (sizeof(To) == 32) return bit_cast<To>(_mm512_maskz_cvtepi32_epi16(0xFFFF, bit_cast<__m512i>(from)));
  if constexpr (sizeof(To) == 16) return bit_cast<To>(_mm512_maskz_cvtepi32_epi8(0xFFFF, bit_cast<__m512i>(from)));
#elif PYCOMM_VECTOR_BYTES == 32
  if constexpr (std::is_same_v<From, typename VectorOf<std::int8_t, 8>::type>) {
    return bit_cast<To>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bit_cast<long long>(from))));
  } else if constexpr (sizeof(From) == 8) {
    return bit_cast<To>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bit_cast<long long>(from))));
  }
  if constexpr (std::is_same_v<To, typename VectorOf<std::uint16_t, 8>::type> && sizeof(From) == 32) {
    const __m256i values = bit_cast<__m256i>(from);  // of 16 bits each
    return bit_cast<To>(_mm_packus_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1)));
  }
  if constexpr (sizeof(To) == 8) {
    const __m256i values = bit_cast<__m256i>(from);  // of 8 bits each, so that packing saturates none
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    return bit_cast<To>(static_cast<long long>(_mm_cvtsi128_si64(_mm_packus_epi16(words, words))));
  }
#endif
  return __builtin_convertvector(from, To);
}

#if PYCOMM_VECTOR_BYTES >= 32
// Four registers of int32 become one of bytes. (AVX-512 has an instruction that narrows one register, which takes longer than a fourth
// of this.)
#if PYCOMM_VECTOR_BYTES == 64
using Packed = __m512i;
// Of each lane of two registers the byte `lower`, then of each the byte `upper`.
template <int lower, int upper, class I>
PYCOMM_HD Packed bytes_of(I a, I b) {
  struct Order {
    alignas(64) unsigned char byte[64];
    constexpr Order() : byte() {
      for (int lane = 0; lane < 32; ++lane) {
        byte[lane] = static_cast<unsigned char>(4 * lane + lower);
        byte[32 + lane] = static_cast<unsigned char>(4 * lane + upper);
      }
    }
  };
  static constexpr Order kOrder;
  return _mm512_permutex2var_epi8(bit_cast<Packed>(a), _mm512_load_si512(kOrder.byte), bit_cast<Packed>(b));
}
// The sums of the halves of 16 bits, low * `low` + high * `high`.
PYCOMM_HD Packed add_halves(Packed a, int low, int high) { return _mm512_madd_epi16(a, _mm512_set1_epi32(low | high << 16)); }
// What is in -128..127.
template <class I>
PYCOMM_HD Packed narrow(I a, I b, I c, I d) {
  return _mm512_mask_blend_epi64(0xF0, bytes_of<0, 0>(a, b), bytes_of<0, 0>(c, d));
}
#else
using Packed = __m256i;
// In the order in which packing leaves them, which takes the lower parts of 128 bits of two registers, then the next ones. What is beyond
// -128..127 becomes the nearer of the two: so what has a sign keeps it.
template <class I>
PYCOMM_HD Packed pack_words(I a, I b) {
  return _mm256_packs_epi32(bit_cast<Packed>(a), bit_cast<Packed>(b));
}
PYCOMM_HD Packed pack_bytes(Packed a, Packed b) { return _mm256_packs_epi16(a, b); }
template <class I>
PYCOMM_HD Packed pack(I a, I b, I c, I d) {
  return pack_bytes(pack_words(a, b), pack_words(c, d));
}
PYCOMM_HD Packed add_halves(Packed a, int low, int high) { return _mm256_madd_epi16(a, _mm256_set1_epi32(low | high << 16)); }
PYCOMM_HD Packed in_order(Packed packed) { return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }
// What is in -128..127.
template <class I>
PYCOMM_HD Packed narrow(I a, I b, I c, I d) {
  return in_order(pack(a, b, c, d));
}
#endif
#endif

template <int lanes>
struct Wide {
  template <class T>
  using Of = typename VectorOf<T, lanes>::type;
  static constexpr int kLanes = lanes;

  template <class To, class From>
  static PYCOMM_HD To convert(From from) {
    return convert_lanes<To>(from);
  }
  template <class T>
  static PYCOMM_HD Of<T> splat(T value) {
    return value - Of<T>{};  // x - 0 is x, also for -0.0
  }
  static PYCOMM_HD Of<std::int32_t> nearest(Of<float> value) {
#if PYCOMM_VECTOR_BYTES == 64
    return bit_cast<Of<std::int32_t>>(_mm512_maskz_cvtps_epi32(0xFFFF, bit_cast<__m512>(value)));
#elif PYCOMM_VECTOR_BYTES == 32
    return bit_cast<Of<std::int32_t>>(_mm256_cvtps_epi32(bit_cast<__m256>(value)));
#else
    return bit_cast<Of<std::int32_t>>(value + kRoundMagic) - kRoundMagicBits;
#endif
  }
  static PYCOMM_HD Of<float> add_exact_product(Of<float> a, Of<float> b, Of<float> c) {
#if PYCOMM_VECTOR_BYTES == 64
    return bit_cast<Of<float>>(_mm512_maskz_fmadd_ps(0xFFFF, bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
#elif PYCOMM_VECTOR_BYTES == 32
    return bit_cast<Of<float>>(_mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
#else
    return a * b + c;
#endif
  }
#if PYCOMM_VECTOR_BYTES == 64
  static PYCOMM_HD Of<std::int32_t> magnitude(Of<std::int32_t> bits) { return bits; }
  static PYCOMM_HD Of<std::int32_t> smaller_magnitude(Of<std::int32_t> a, std::int32_t bound) { return choose_magnitude<2>(a, bound); }
  static PYCOMM_HD Of<std::int32_t> larger_magnitude(Of<std::int32_t> a, std::int32_t bound) { return choose_magnitude<3>(a, bound); }
  template <int smaller_or_larger>
  static PYCOMM_HD Of<std::int32_t> choose_magnitude(Of<std::int32_t> a, std::int32_t bound) {
    const __m512 bounds = bit_cast<__m512>(splat<std::int32_t>(bound));
    return bit_cast<Of<std::int32_t>>(_mm512_maskz_range_ps(0xFFFF, bit_cast<__m512>(a), bounds, smaller_or_larger));
  }
#else
  static PYCOMM_HD Of<std::int32_t> magnitude(Of<std::int32_t> bits) { return bits & 0x7FFFFFFF; }
  static PYCOMM_HD Of<std::int32_t> smaller_magnitude(Of<std::int32_t> a, std::int32_t bound) { return smaller(a, splat(bound)); }
  static PYCOMM_HD Of<std::int32_t> larger_magnitude(Of<std::int32_t> a, std::int32_t bound) { return larger(a, splat(bound)); }
#endif
  // By intrinsics, as GCC does not see one instruction in a comparison with a constant and a choice.
  static PYCOMM_HD Of<std::int32_t> smaller(Of<std::int32_t> a, Of<std::int32_t> b) {
#if PYCOMM_VECTOR_BYTES == 64
    return bit_cast<Of<std::int32_t>>(_mm512_maskz_min_epi32(0xFFFF, bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif PYCOMM_VECTOR_BYTES == 32
    return bit_cast<Of<std::int32_t>>(_mm256_min_epi32(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#else
    return select(a < b, a, b);
#endif
  }
  static PYCOMM_HD Of<std::int32_t> larger(Of<std::int32_t> a, Of<std::int32_t> b) {
#if PYCOMM_VECTOR_BYTES == 64
    return bit_cast<Of<std::int32_t>>(_mm512_maskz_max_epi32(0xFFFF, bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif PYCOMM_VECTOR_BYTES == 32
    return bit_cast<Of<std::int32_t>>(_mm256_max_epi32(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#else
    return select(a > b, a, b);
#endif
  }
};

// The largest of the lanes.
template <class I>
PYCOMM_HD std::int32_t largest_lane(I values) {
#if PYCOMM_VECTOR_BYTES == 64
  __m256i half[2];
  std::memcpy(half, &values, sizeof(values));
  const __m256i halves = _mm256_max_epi32(half[0], half[1]);
#elif PYCOMM_VECTOR_BYTES == 32
  const __m256i halves = bit_cast<__m256i>(values);
#endif
#if PYCOMM_VECTOR_BYTES >= 32
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  most = _mm_max_epi32(most, _mm_unpackhi_epi64(most, most));
  return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 1)));
#else
  std::int32_t lanes[sizeof(I) / 4], most = 0;
  std::memcpy(lanes, &values, sizeof(lanes));
  for (const std::int32_t lane : lanes) most = most > lane ? most : lane;
  return most;
#endif
}

// The larger of each two lanes that are neighbours, of `a`, then of `b`.
template <class I>
PYCOMM_HD I larger_neighbours(I a, I b) {
  using W = Wide<sizeof(I) / 4>;
#if PYCOMM_VECTOR_BYTES == 64
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i evens = _mm512_permutex2var_epi32(bit_cast<__m512i>(a), even, bit_cast<__m512i>(b));
  const __m512i odds = _mm512_permutex2var_epi32(bit_cast<__m512i>(a), even + _mm512_set1_epi64(0x100000001), bit_cast<__m512i>(b));
  return W::larger(bit_cast<I>(evens), bit_cast<I>(odds));
#elif PYCOMM_VECTOR_BYTES == 32
  const __m256 evens = _mm256_shuffle_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), 0x88);
  const __m256 odds = _mm256_shuffle_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), 0xDD);
  const I larger = W::larger(bit_cast<I>(evens), bit_cast<I>(odds));  // a b a b, by 64 bits
  return bit_cast<I>(_mm256_permute4x64_epi64(bit_cast<__m256i>(larger), 0xD8));
#else
  I evens = a, odds = a;
  for (int lane = 0; lane < W::kLanes / 2; ++lane) {
    evens[lane] = a[2 * lane], odds[lane] = a[2 * lane + 1];
    evens[lane + W::kLanes / 2] = b[2 * lane], odds[lane + W::kLanes / 2] = b[2 * lane + 1];
  }
  return W::larger(evens, odds);
#endif
}

// The largest lane of each of `count` registers, as many as they have lanes, in their order.
template <int count, class I>
PYCOMM_HD I largest_of_each(const I* values) {
  if constexpr (count == 1) {
    return *values;
  } else {
    return larger_neighbours(largest_of_each<count / 2>(values), largest_of_each<count / 2>(values + count / 2));
  }
}

// The products of the low halves of lanes of 64 bits with `factor`.
template <class Words>
PYCOMM_HD Words multiply_low(Words a, std::uint32_t factor) {
#if PYCOMM_VECTOR_BYTES == 64
  return bit_cast<Words>(_mm512_maskz_mul_epu32(0xFF, bit_cast<__m512i>(a), _mm512_set1_epi64(factor)));
#elif PYCOMM_VECTOR_BYTES == 32
  return bit_cast<Words>(_mm256_mul_epu32(bit_cast<__m256i>(a), _mm256_set1_epi64x(factor)));
#else
  return (a & 0xFFFFFFFFu) * std::uint64_t{factor};
#endif
}

// -- memory: any alignment -------------------------------------------------------------------------------------------

template <class V>
PYCOMM_HD V load(const char* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <class V>
PYCOMM_HD void store(char* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

// The signs of as many floats as the answer has bits, the first one's in the lowest.
PYCOMM_HD auto signs_of(const char* from) {
#if PYCOMM_VECTOR_BYTES == 64
  return static_cast<std::uint16_t>(_mm512_movepi32_mask(load<__m512i>(from)));
#elif PYCOMM_VECTOR_BYTES == 32
  const auto bits = [from](int k) PYCOMM_INLINE { return load<__m256i>(from + k * sizeof(__m256i)); };
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(narrow(bits(0), bits(1), bits(2), bits(3))));
#else
  std::uint32_t signs = 0;
  for (int k = 0; k < 8; ++k) signs |= load<std::uint32_t>(from + 4 * k) >> 31 << k;
  return static_cast<std::uint8_t>(signs);
#endif
}

// Writes the pairs (a, b) of the even lanes of 64 bits, then those of the odd lanes.
template <class Words>
PYCOMM_HD void store_pairs(char* to, Words a, Words b) {
#if PYCOMM_VECTOR_BYTES == 64
  store(to, _mm512_maskz_unpacklo_epi64(0xFF, bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
  store(to + sizeof(Words), _mm512_maskz_unpackhi_epi64(0xFF, bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif PYCOMM_VECTOR_BYTES == 32
  store(to, _mm256_unpacklo_epi64(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
  store(to + sizeof(Words), _mm256_unpackhi_epi64(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#else
  store(to, Words{a[0], b[0]});
  store(to + sizeof(Words), Words{a[1], b[1]});
#endif
}

// A non-temporal store. `to` is aligned to sizeof(V).
template <class V>
PYCOMM_HD void store_streamed(char* to, V value) {
#if PYCOMM_VECTOR_BYTES == 64
  if constexpr (sizeof(V) == 64) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bit_cast<__m512i>(value));
#endif
#if PYCOMM_VECTOR_BYTES >= 32
  if constexpr (sizeof(V) == 32) return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bit_cast<__m256i>(value));
#endif
#if defined(__x86_64__)
  if constexpr (sizeof(V) == 16) return _mm_stream_si128(reinterpret_cast<__m128i*>(to), bit_cast<__m128i>(value));
  if constexpr (sizeof(V) == 8) return _mm_stream_si64(reinterpret_cast<long long*>(to), bit_cast<long long>(value));
  if constexpr (sizeof(V) == 4) return _mm_stream_si32(reinterpret_cast<int*>(to), bit_cast<int>(value));
#endif
  store(to, value);
}

// -- elements: common/'s way, but for float16 (the hardware converts) and bfloat16 (no shuffles) ---------------------

// The values of one register of bfloat16: those of the even and of the odd lanes, which a shift and a mask tell apart.
template <class V>
struct Halves {
  V even, odd;
};

template <class W, class Element>
inline constexpr bool kUsesHalves = W::kLanes > 1 && std::is_same_v<Element, BFloat16>;

template <class W, class Element>
inline constexpr bool kUsesF16C =
    PYCOMM_VECTOR_BYTES >= 32 && W::kLanes > 1 && std::is_same_v<Element, Small<Float16Format>>;

#if PYCOMM_VECTOR_BYTES == 64
using HalfRegister = __m256i;
using FloatRegister = __m512;
PYCOMM_HD FloatRegister half_to_float(HalfRegister half) { return _mm512_maskz_cvtph_ps(0xFFFF, half); }
PYCOMM_HD HalfRegister float_to_half(FloatRegister value) {
  return _mm512_maskz_cvtps_ph(0xFFFF, value, _MM_FROUND_TO_NEAREST_INT);
}
PYCOMM_HD HalfRegister upper_half(Packed words) { return _mm512_maskz_extracti64x4_epi64(0xF, words, 1); }
PYCOMM_HD Packed bytes_to_words(HalfRegister bytes) { return _mm512_maskz_cvtepi8_epi16(0xFFFFFFFF, bytes); }  // signed
#elif PYCOMM_VECTOR_BYTES == 32
using HalfRegister = __m128i;
using FloatRegister = __m256;
PYCOMM_HD FloatRegister half_to_float(HalfRegister half) { return _mm256_cvtph_ps(half); }
PYCOMM_HD HalfRegister float_to_half(FloatRegister value) { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }
PYCOMM_HD HalfRegister upper_half(Packed words) { return _mm256_extracti128_si256(words, 1); }
PYCOMM_HD Packed bytes_to_words(HalfRegister bytes) { return _mm256_cvtepi8_epi16(bytes); }
#else
using HalfRegister = int;
using FloatRegister = int;
FloatRegister half_to_float(HalfRegister half);  // kUsesF16C is false: never called
HalfRegister float_to_half(FloatRegister value);
#endif
#if PYCOMM_VECTOR_BYTES >= 32
PYCOMM_HD HalfRegister lower_half(Packed words) {
  HalfRegister half;  // GCC 12 warns of the intrinsic
  std::memcpy(&half, &words, sizeof(half));
  return half;
}
#endif

template <class W, class Element>
PYCOMM_HD auto load_values(const char* from) {
  using Stored = typename W::template Of<typename Element::Storage>;
  if constexpr (kUsesHalves<W, Element>) {
    using U = typename Wide<W::kLanes / 2>::template Of<std::uint32_t>;
    using V = typename Wide<W::kLanes / 2>::template Of<float>;
    const U both = load<U>(from);
    return Halves<V>{bit_cast<V>(both << 16), bit_cast<V>(both & 0xFFFF0000u)};
  } else if constexpr (kUsesF16C<W, Element>) {
    return bit_cast<typename W::template Of<float>>(half_to_float(load<HalfRegister>(from)));
  } else {
    return Element::template decode<W>(load<Stored>(from));
  }
}

template <class W, class Element, class Values>
PYCOMM_HD auto encode_values(Values values) {
  if constexpr (kUsesHalves<W, Element>) {
    using Half = Wide<W::kLanes / 2>;
    return (round_to_bfloat16<Half>(values.even) >> 16) | (round_to_bfloat16<Half>(values.odd) & 0xFFFF0000u);
  } else if constexpr (kUsesF16C<W, Element>) {
    return float_to_half(bit_cast<FloatRegister>(Native<float>::encode<W>(values)));
  } else {
    return Element::template encode<W>(values);
  }
}

template <class Op, class V>
PYCOMM_HD V combine(V a, V b) {
  return Op::combine(a, b);
}
template <class Op, class V>
PYCOMM_HD Halves<V> combine(Halves<V> a, Halves<V> b) {
  return {Op::combine(a.even, b.even), Op::combine(a.odd, b.odd)};
}

template <class V, class T>
PYCOMM_HD V scale(V values, T factor) {
  return values * factor;
}
template <class V, class T>
PYCOMM_HD Halves<V> scale(Halves<V> values, T factor) {
  return {values.even * factor, values.odd * factor};
}

template <class V, class T>
PYCOMM_HD V divide(V values, const Divisor<T>& divisor) {
  return divisor.is_power_of_two ? values * divisor.reciprocal : values / divisor.count;
}
template <class V, class T>
PYCOMM_HD Halves<V> divide(Halves<V> values, const Divisor<T>& divisor) {
  return {divide(values.even, divisor), divide(values.odd, divisor)};
}

}  // namespace pycomm::PYCOMM_ISA
