// The passes of topk() for one instruction set: see codec_body.h, which includes this. topk.cpp puts them together.

namespace pycomm::PYCOMM_ISA {

// Writes the lanes of `mask` one after the other; may write a whole register. Returns how many.
#if PYCOMM_VECTOR_BYTES == 64
PYCOMM_HD std::size_t compress(std::int32_t* indices, float* values, std::uint32_t mask, __m512i index, __m512 value) {
  const auto lanes = static_cast<__mmask16>(mask);
  _mm512_storeu_si512(indices, _mm512_maskz_compress_epi32(lanes, index));
  _mm512_storeu_ps(values, _mm512_maskz_compress_ps(lanes, value));
  return static_cast<std::size_t>(__builtin_popcount(mask));
}
#endif

// Which magnitudes (as bits) are at least `least`: a register of -1 and 0, or for AVX-512 a mask.
template <class I>
PYCOMM_HD auto at_least(I bits, std::int32_t least) {
#if PYCOMM_VECTOR_BYTES == 64
  const __m512i magnitude = _mm512_and_si512(bit_cast<__m512i>(bits), _mm512_set1_epi32(0x7FFFFFFF));
  return static_cast<std::uint32_t>(_mm512_cmpge_epi32_mask(magnitude, _mm512_set1_epi32(least)));
#else
  return (bits & 0x7FFFFFFF) > least - 1;
#endif
}

// One bit a lane.
template <class Lanes>
PYCOMM_HD std::uint32_t mask_of(Lanes lanes) {
#if PYCOMM_VECTOR_BYTES == 64
  return lanes;
#elif PYCOMM_VECTOR_BYTES == 32
  return static_cast<std::uint32_t>(_mm256_movemask_ps(bit_cast<__m256>(lanes)));
#else
  std::uint32_t mask = 0;
  for (std::size_t lane = 0; lane < kLanesOfFloat; ++lane) mask |= (lanes[lane] & 1u) << lane;
  return mask;
#endif
}

// Reads all of the input once: candidates are those whose magnitude is at least `pass.least`. Writes the sum to the residual.
template <bool has_residual, bool is_long>
std::size_t collect_candidates(const CollectPass& pass) {
  using I = typename Floats::Of<std::int32_t>;
  std::size_t found = 0, i = 0;
  std::int32_t* const indices = pass.indices;
  float* const values = pass.values;
  constexpr ReadAhead ahead{is_long};
  const float* const sums = has_residual ? pass.residual : pass.flat;
  const auto add = [&](std::size_t index) PYCOMM_INLINE {
    if (found < pass.capacity) {
      indices[found] = static_cast<std::int32_t>(index);
      values[found] = sums[index];
    }
    ++found;
  };
  // As a rule none of four registers has a candidate: so they are looked at together, and then their candidates in one loop.
  constexpr std::size_t kStep = 4 * kLanesOfFloat;
  for (; i + kStep <= pass.numel; i += kStep) {
    ahead.fetch<4 * kStep>(pass.flat + i);
    if constexpr (has_residual) ahead.fetch<4 * kStep, 2048, true>(pass.residual + i);
    I bits[4];
#pragma GCC unroll 4
    for (std::size_t k = 0; k < 4; ++k) bits[k] = read_bits<Floats, has_residual>(pass.flat, pass.residual, i + k * kLanesOfFloat);
    const auto a = at_least(bits[0], pass.least), b = at_least(bits[1], pass.least);
    const auto c = at_least(bits[2], pass.least), d = at_least(bits[3], pass.least);
    if (__builtin_expect(mask_of((a | b) | (c | d)) == 0, true)) continue;
#if PYCOMM_VECTOR_BYTES == 64
    if (found + kStep <= pass.capacity) {
      const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      const std::uint32_t masks[4] = {a, b, c, d};
#pragma GCC unroll 4
      for (std::size_t k = 0; k < 4; ++k) {
        const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(i + k * kLanesOfFloat)), lane);
        found += compress(indices + found, values + found, masks[k], index, bit_cast<__m512>(bits[k]));
      }
      continue;
    }
#endif
    std::uint64_t mask = mask_of(a) | std::uint64_t{mask_of(b)} << kLanesOfFloat | std::uint64_t{mask_of(c)} << 2 * kLanesOfFloat |
                         std::uint64_t{mask_of(d)} << 3 * kLanesOfFloat;
    for (; mask != 0; mask &= mask - 1) add(i + static_cast<std::size_t>(__builtin_ctzll(mask)));
  }
  for (; i < pass.numel; ++i) {
    if ((read_bits<Scalar, has_residual>(pass.flat, pass.residual, i) & 0x7FFFFFFF) >= pass.least) add(i);
  }
  return found;
}

template <bool has_residual>
std::size_t run_collect_long_or_short(const CollectPass& pass) {
  return 4 * pass.numel >= kLongBytes ? collect_candidates<has_residual, true>(pass) : collect_candidates<has_residual, false>(pass);
}

inline std::size_t run_collect(const CollectPass& pass) {
  return pass.residual != nullptr ? run_collect_long_or_short<true>(pass) : run_collect_long_or_short<false>(pass);
}

}  // namespace pycomm::PYCOMM_ISA
