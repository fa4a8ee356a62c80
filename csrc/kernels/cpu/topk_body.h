// The passes of topk() for one instruction set: see codec_body.h, which includes this. topk.cpp puts them together.

namespace pycomm::PYCOMM_ISA {

// Which magnitudes (as bits) are at least `least`: a register of -1 and 0, or for AVX-512 a mask.
template <class I>
PYCOMM_HD auto at_least(I bits, std::int32_t least) {
#if PYCOMM_VECTOR_BYTES == 64
  const __m512i magnitude = _mm512_and_si512(bit_cast<__m512i>(bits), _mm512_set1_epi32(0x7FFFFFFF));
  return _mm512_cmpge_epi32_mask(magnitude, _mm512_set1_epi32(least));
#else
  return (bits & 0x7FFFFFFF) > least - 1;
#endif
}

// What is looked at together: four registers, a bit of a mask for each element.
inline constexpr std::size_t kGroup = 4 * kLanesOfFloat;

template <class Lanes>
PYCOMM_HD std::uint64_t mask_of(Lanes a, Lanes b, Lanes c, Lanes d) {
#if PYCOMM_VECTOR_BYTES == 64
  // Not by shifts of numbers: where GCC 12 runs out of registers it stores 16 bits of such a mask, and loads 32 of it.
  return _mm512_kunpackd(_mm512_kunpackw(d, c), _mm512_kunpackw(b, a));
#elif PYCOMM_VECTOR_BYTES == 32
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(narrow(a, b, c, d)));
#else
  const Lanes bits = (a & 1) | (b & 1 << kLanesOfFloat) | (c & 1 << 2 * kLanesOfFloat) | (d & 1 << 3 * kLanesOfFloat);
  std::uint64_t mask = 0;
  for (std::size_t lane = 0; lane < kLanesOfFloat; ++lane) mask |= std::uint64_t(bits[lane]) << lane;
  return mask;
#endif
}

// The candidates of one pass, in the order of their indices.
struct Candidates {
  const CollectPass& pass;
  const float* sums;
  std::size_t found = 0;

  // Adds those of a group of elements, from `first` on, whose bits are set: at least one.
  PYCOMM_HD void add(std::size_t first, std::uint64_t mask) {
    const auto put = [&](std::size_t at, std::uint64_t bits) {
      const std::size_t index = first + static_cast<std::size_t>(__builtin_ctzll(bits));
      pass.indices[at] = static_cast<std::int32_t>(index);
      pass.values[at] = sums[index];
    };
    std::size_t at = found;
    found += static_cast<std::size_t>(__builtin_popcountll(mask));
    if (__builtin_expect(at + kGroup > pass.capacity, false)) {
      for (; mask != 0 && at < pass.capacity; mask &= mask - 1) put(at++, mask);
      return;
    }
    // As a rule there are one or two. Nobody can foretell which, so two are written in either case.
    std::uint64_t others = mask & (mask - 1);
    put(at++, mask);
    put(at++, others != 0 ? others : mask);
    while (__builtin_expect((others &= others - 1) != 0, false)) put(at++, others);
  }
};

// The groups of a block that have candidates.
//
// A processor looks among the stores under way for the bytes that it loads by the last 12 bits of their addresses, and waits where
// only these agree. Every group stores a note, so once in each page some line is loaded right after a note that lies as it does. With
// AVX-512 that costs Zen 5 10 ns, but nothing if it is the first of the four lines of a group: 1 Mi elements took 70 us or 48, by where the
// notes happened to lie on the stack. So there they are kept to lines that lie as those do. (AVX2, with two lines to a group, gains nothing.)
class Notes {
 public:
  static constexpr std::size_t kGroups = 64;  // a block is 8 KiB with AVX2: it stays in the L1 cache

  // Of groups that begin so many bytes behind a multiple of their length as `input` does.
  explicit PYCOMM_HD Notes(const float* input) : line_(reinterpret_cast<std::uintptr_t>(input) % kBytesApart / 64 * kInLine) {}

  // Adds a group, if its mask has a bit.
  PYCOMM_HD void add(std::size_t first, std::uint64_t mask) {
    firsts_[slot(count_)] = first;
    masks_[slot(count_)] = mask;
    count_ += mask != 0;
  }
  PYCOMM_HD std::size_t count() const { return count_; }
  PYCOMM_HD std::size_t first(std::size_t i) const { return firsts_[slot(i)]; }
  PYCOMM_HD std::uint64_t mask(std::size_t i) const { return masks_[slot(i)]; }

 private:
  static constexpr bool kIsAvx512 = PYCOMM_VECTOR_BYTES == 64;
  static constexpr std::size_t kBytesApart = kIsAvx512 ? 4 * kGroup : 64;  // from one line of notes to the next
  static constexpr std::size_t kAlignment = kIsAvx512 ? kBytesApart : alignof(std::uint64_t);
  static constexpr std::size_t kInLine = 64 / sizeof(std::uint64_t), kApart = kBytesApart / sizeof(std::uint64_t);
  static constexpr std::size_t kSlots = kGroups / kInLine * kApart + kApart - kInLine;
  PYCOMM_HD std::size_t slot(std::size_t i) const { return line_ + i % kInLine + i / kInLine * kApart; }

  const std::size_t line_;
  std::size_t count_ = 0;
  alignas(kAlignment) std::uint64_t firsts_[kSlots];
  alignas(kAlignment) std::uint64_t masks_[kSlots];
};

// Reads all of the input once: candidates are those whose magnitude is at least `pass.least`. Writes the sum to the residual.
//
// A branch for each group of elements that has a candidate would be foretold wrongly every other time. So of each block
// the groups that have some are noted first, without a branch, and then gone through.
template <bool has_residual, bool by_pages>
std::size_t collect_candidates(const CollectPass& pass) {
  using I = typename Floats::Of<std::int32_t>;
  constexpr ReadAhead ahead{by_pages};
  Candidates candidates{pass, has_residual ? pass.residual : pass.flat};
  std::size_t i = 0;
  while (i + kGroup <= pass.numel) {
    Notes notes(pass.flat);
    for (const std::size_t end = std::min(i + Notes::kGroups * kGroup, pass.numel); i + kGroup <= end; i += kGroup) {
      ahead.fetch<4 * kGroup>(pass.flat + i);
      if constexpr (has_residual) ahead.fetch<4 * kGroup, 2048, true>(pass.residual + i);
      I bits[4];
#pragma GCC unroll 4
      for (std::size_t k = 0; k < 4; ++k) bits[k] = read_bits<Floats, has_residual>(pass.flat, pass.residual, i + k * kLanesOfFloat);
      const auto a = at_least(bits[0], pass.least), b = at_least(bits[1], pass.least);
      const auto c = at_least(bits[2], pass.least), d = at_least(bits[3], pass.least);
      notes.add(i, mask_of(a, b, c, d));
    }
    for (std::size_t note = 0; note < notes.count(); ++note) candidates.add(notes.first(note), notes.mask(note));
  }
  for (; i < pass.numel; ++i) {
    if ((read_bits<Scalar, has_residual>(pass.flat, pass.residual, i) & 0x7FFFFFFF) >= pass.least) candidates.add(i, 1);
  }
  return candidates.found;
}

template <bool has_residual>
std::size_t run_collect_long_or_short(const CollectPass& pass) {
  return reads_by_pages(4 * pass.numel) ? collect_candidates<has_residual, true>(pass) : collect_candidates<has_residual, false>(pass);
}

inline std::size_t run_collect(const CollectPass& pass) {
  return pass.residual != nullptr ? run_collect_long_or_short<true>(pass) : run_collect_long_or_short<false>(pass);
}

}  // namespace pycomm::PYCOMM_ISA
