// The first pass of quantize() for one instruction set, and what all of codec_body.h, which includes this, reads and writes by:
// what the scale of a block follows from, its largest magnitude or their sum.

namespace pycomm::PYCOMM_ISA {

using Floats = Wide<PYCOMM_VECTOR_BYTES / 4>;
inline constexpr std::size_t kLanesOfFloat = PYCOMM_VECTOR_BYTES / 4;
inline constexpr std::size_t kChunk = 2048, kLeastBlock = 32, kBlocks = kChunk / kLeastBlock;  // elements; blocks at most of a chunk

// Calls body(W, index) for whole vectors of [0, count), then one element at a time for the rest.
template <class Body>
PYCOMM_HD void for_lanes(std::size_t count, Body body) {
  std::size_t i = 0;
#pragma GCC unroll 4
  for (; i + kLanesOfFloat <= count; i += kLanesOfFloat) body(Floats{}, i);
  for (std::size_t rest = count % kLanesOfFloat; rest > 0; --rest) body(Scalar{}, i++);
}

template <class V>
PYCOMM_HD V load_at(const void* base, std::size_t byte) {
  return load<V>(static_cast<const char*>(base) + byte);
}
template <class V>
PYCOMM_HD void store_at(void* base, std::size_t byte, V value) {
  store(static_cast<char*>(base) + byte, value);
}
template <class W>
PYCOMM_HD auto load_floats(const float* from, std::size_t i) {
  return load_at<typename W::template Of<float>>(from, 4 * i);
}

// Codes of one byte, as int32.
template <class W>
PYCOMM_HD auto load_codes(const std::uint8_t* from, std::size_t i) {
  return W::template convert<typename W::template Of<std::int32_t>>(load_at<typename W::template Of<std::uint8_t>>(from, i));
}
template <class W>
PYCOMM_HD void store_codes(std::uint8_t* to, std::size_t i, typename W::template Of<std::int32_t> codes) {
  if constexpr (PYCOMM_VECTOR_BYTES < 64) codes = codes & 255;  // AVX-512 takes the low bits by itself
  store_at(to, i, W::template convert<typename W::template Of<std::uint8_t>>(codes));
}

// What a pass over a chunk reads from `flat` on, and asks for while it takes `numel` elements from the i-th on. With a residual the first
// pass adds it, and writes the sum there.
template <bool has_residual>
struct Input {
  const ReadAhead& ahead;
  const float* flat;
  float* residual;  // null: none

  const float* sum() const { return has_residual ? residual : flat; }

  template <std::size_t numel>
  PYCOMM_HD void fetch_in_first_pass(std::size_t i) const {
    if (kBothAsk && !ahead.by_pages()) fetch<numel, 1>(i);
  }
  template <std::size_t numel>
  PYCOMM_HD void fetch_in_second_pass(std::size_t i) const {
    fetch<numel, kBothAsk ? 2 : 1>(i);
  }

 private:
  static constexpr bool kBothAsk = PYCOMM_VECTOR_BYTES == 64 && !has_residual;  // what the L1 cache has room for

  template <std::size_t numel, std::size_t chunks>
  PYCOMM_HD void fetch(std::size_t i) const {
    ahead.fetch<4 * numel, 4 * kChunk * chunks>(flat + i);
    if constexpr (has_residual) ahead.fetch<4 * numel, 4 * kChunk * chunks, true>(residual + i);
  }
};

// The input's bits at `i`; with a residual the sum, which the residual then holds.
template <class W, bool has_residual>
PYCOMM_HD auto read_bits(const float* flat, float* residual, std::size_t i) {
  auto x = load_floats<W>(flat, i);
  if constexpr (has_residual) {
    x = x + load_floats<W>(residual, i);
    store_at(residual, 4 * i, x);
  }
  return bit_cast<typename W::template Of<std::int32_t>>(x);
}

// The bits of the largest magnitude in each lane: as integers NaN > infinity > all else.
template <bool has_residual>
PYCOMM_HD auto find_amax(const Input<has_residual>& input, std::size_t count) {
  using I = typename Floats::Of<std::int32_t>;
  constexpr std::size_t kStep = 4 * kLanesOfFloat;
  I most[4] = {};
  std::size_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    input.template fetch_in_first_pass<kStep>(i);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const I bits = read_bits<Floats, has_residual>(input.flat, input.residual, i + k * kLanesOfFloat) & 0x7FFFFFFF;
      most[k] = Floats::larger(most[k], bits);
    }
  }
  for (; i + kLanesOfFloat <= count; i += kLanesOfFloat) {  // the blocks of MX are shorter than a step
    most[0] = Floats::larger(most[0], read_bits<Floats, has_residual>(input.flat, input.residual, i) & 0x7FFFFFFF);
  }
  for (int k = 1; k < 4; ++k) most[0] = Floats::larger(most[0], most[k]);
  for (; i < count; ++i) most[0][0] = std::max(most[0][0], read_bits<Scalar, has_residual>(input.flat, input.residual, i) & 0x7FFFFFFF);
  return most[0];
}

// The sum of the magnitudes, in the order of [Note: lanes of a sum].
template <bool has_residual>
float sum_magnitudes(const Input<has_residual> input, std::size_t count) {  // a copy: no store can change it
  using I = typename Floats::Of<std::int32_t>;
  using V = typename Floats::Of<float>;
  constexpr std::size_t kSums = 8, kAtOnce = kSums * kLanesOfFloat;  // AVX2 has no registers for all lanes: it goes over a chunk twice
  alignas(64) float lanes[kSumLanes];  // written by the first chunk
  if (count < kSumLanes) std::memset(lanes, 0, sizeof(lanes));
  std::size_t i = 0;
  for (const std::size_t whole = count - count % kSumLanes; i < whole;) {
    const std::size_t begin = i, end = std::min(whole, begin + kChunk);
    for (std::size_t lane = 0; lane < kSumLanes; lane += kAtOnce) {
      V sums[kSums] = {};
      for (std::size_t k = 0; k < kSums && begin > 0; ++k) sums[k] = load_floats<Floats>(lanes, lane + k * kLanesOfFloat);
      for (i = begin; i < end; i += kSumLanes) {
        input.template fetch_in_first_pass<kAtOnce>(i + lane);
#pragma GCC unroll 8
        for (std::size_t k = 0; k < kSums; ++k) {
          const I bits = read_bits<Floats, has_residual>(input.flat, input.residual, i + lane + k * kLanesOfFloat) & 0x7FFFFFFF;
          sums[k] = sums[k] + bit_cast<V>(bits);
        }
      }
      for (std::size_t k = 0; k < kSums; ++k) store_at(lanes, 4 * (lane + k * kLanesOfFloat), sums[k]);
    }
  }
  for (std::size_t lane = 0; i < count; ++i, ++lane) {
    lanes[lane] += bit_cast<float>(read_bits<Scalar, has_residual>(input.flat, input.residual, i) & 0x7FFFFFFF);
  }
  for (std::size_t half = kSumLanes / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

}  // namespace pycomm::PYCOMM_ISA
