// The passes of topk() for one instruction set: see codec_body.h, which includes this. topk.cpp puts them together.

namespace pycomm::PYCOMM_ISA {

// Writes the lanes of `mask` one after the other; may write a whole register. Returns how many.
#if PYCOMM_VECTOR_BYTES == 64
inline constexpr bool kCompresses = true;
PYCOMM_HD std::size_t compress(std::int32_t* indices, float* values, std::uint32_t mask, __m512i index, __m512 value) {
  const auto lanes = static_cast<__mmask16>(mask);
  _mm512_storeu_si512(indices, _mm512_maskz_compress_epi32(lanes, index));
  _mm512_storeu_ps(values, _mm512_maskz_compress_ps(lanes, value));
  return static_cast<std::size_t>(__builtin_popcount(mask));
}
#endif

// One bit a lane: whether the magnitude (as bits) is at least `least`.
template <class I>
PYCOMM_HD std::uint32_t lanes_at_least(I bits, std::int32_t least) {
#if PYCOMM_VECTOR_BYTES == 64
  const __m512i magnitude = _mm512_and_si512(bit_cast<__m512i>(bits), _mm512_set1_epi32(0x7FFFFFFF));
  return _mm512_cmpge_epi32_mask(magnitude, _mm512_set1_epi32(least));
#elif PYCOMM_VECTOR_BYTES == 32
  const __m256i is_at_least = bit_cast<__m256i>((bits & 0x7FFFFFFF) >= least);
  return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(is_at_least)));
#else
  const I is_at_least = (bits & 0x7FFFFFFF) >= least;
  std::uint32_t mask = 0;
  for (std::size_t lane = 0; lane < kLanesOfFloat; ++lane) mask |= (is_at_least[lane] & 1u) << lane;
  return mask;
#endif
}

// Reads all of the input once: candidates are those whose magnitude is at least `pass.least`. Writes the sum to the residual.
template <bool has_residual>
std::size_t collect_candidates(const CollectPass& pass) {
  using I = typename Floats::Of<std::int32_t>;
  std::size_t found = 0, i = 0;
  std::int32_t* const indices = pass.indices;
  float* const values = pass.values;
  const auto add = [&](std::size_t index, std::int32_t bits) PYCOMM_INLINE {
    if (found < pass.capacity) {
      indices[found] = static_cast<std::int32_t>(index);
      values[found] = bit_cast<float>(bits);
    }
    ++found;
  };
  const std::size_t vectors = pass.numel / kLanesOfFloat * kLanesOfFloat;
  for (; i < vectors; i += kLanesOfFloat) {
    const I bits = read_bits<Floats, has_residual>(pass.flat, pass.residual, i);
    std::uint32_t mask = lanes_at_least(bits, pass.least);
    if (__builtin_expect(mask == 0, true)) continue;
#if PYCOMM_VECTOR_BYTES == 64
    if (found + kLanesOfFloat <= pass.capacity) {
      const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(i)), lane);
      found += compress(indices + found, values + found, mask, index, bit_cast<__m512>(bits));
      continue;
    }
#endif
    std::int32_t each[kLanesOfFloat];
    std::memcpy(each, &bits, sizeof(each));
    for (; mask != 0; mask &= mask - 1) {
      const auto lane = static_cast<std::size_t>(__builtin_ctz(mask));
      add(i + lane, each[lane]);
    }
  }
  for (; i < pass.numel; ++i) {
    const std::int32_t bits = read_bits<Scalar, has_residual>(pass.flat, pass.residual, i);
    if ((bits & 0x7FFFFFFF) >= pass.least) add(i, bits);
  }
  return found;
}

inline std::size_t run_collect(const CollectPass& pass) {
  return pass.residual != nullptr ? collect_candidates<true>(pass) : collect_candidates<false>(pass);
}

}  // namespace pycomm::PYCOMM_ISA
