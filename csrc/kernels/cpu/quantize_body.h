// quantize() for one instruction set: see codec_body.h, which includes this after reach_body.h.
//
// The idea: a chunk of 2048 elements stays in the L1 cache. The first pass over its blocks finds their scales (and with a
// residual writes the input there), the second encodes to one byte an element beside it; the bytes are then packed and
// written to the payload. So the input is read from memory once, and the payload written once. The scales come first, all of
// them: each is long in coming (two divisions, after what joins lanes), and none is waited for.
//
// Neither pass reads from memory by itself, so both ask for what comes: the first for the next chunk, the second for the chunk
// after it. With a residual, which is as long, only the second asks, for the next chunk: the L1 cache holds no more. Nor does that of
// 32 KiB that most processors with AVX2 have.

namespace pycomm::PYCOMM_ISA {

// -- pass 2: the codes ------------------------------------------------------------------------------------------------

// 16 random bits for each of the elements [first, first + count), count <= kChunk. `room` holds the answer.
struct Random {
  static constexpr int kWords = PYCOMM_VECTOR_BYTES / 8, kAtOnce = 4;  // groups of a register; registers, each round waits for the one before
  static constexpr std::size_t kGroups = kAtOnce * kWords;
  alignas(64) std::uint16_t room[kChunk + (1 + kGroups) * kPhiloxGroup];
};
inline const std::uint16_t* fill_random(Random& random, std::uint64_t seed, std::uint64_t first, std::size_t count) {
  using Words = VectorOf<std::uint64_t, Random::kWords>::type;
  const std::uint64_t group = first / kPhiloxGroup;
  const std::size_t skipped = first % kPhiloxGroup, groups = (skipped + count + kPhiloxGroup - 1) / kPhiloxGroup;
  std::uint64_t each[Random::kWords];  // the even lanes have the first groups, the odd ones those behind: as store_pairs() wants it
  for (int lane = 0; lane < Random::kWords; ++lane) each[lane] = group + lane / 2 + (lane % 2 != 0 ? Random::kWords / 2 : 0);
  for (std::size_t g = 0; g < groups; g += Random::kGroups) {
    Words word[Random::kAtOnce][4];
    for (int k = 0; k < Random::kAtOnce; ++k) {
      std::memcpy(&word[k][0], each, sizeof(Words));
      word[k][0] += g + k * Random::kWords;
      word[k][1] = word[k][0] >> 32;
      word[k][2] = word[k][3] = Words{};
    }
    std::uint32_t key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round, key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1) {
#pragma GCC unroll 4
      for (int k = 0; k < Random::kAtOnce; ++k) {
        philox_round(word[k], key0, key1, [](auto a, std::uint32_t b) PYCOMM_INLINE { return multiply_low(a, b); });
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < Random::kAtOnce; ++k) {
      const Words low = (word[k][0] & 0xFFFFFFFFu) | word[k][1] << 32, high = (word[k][2] & 0xFFFFFFFFu) | word[k][3] << 32;
      store_pairs(reinterpret_cast<char*>(random.room + (g + k * Random::kWords) * kPhiloxGroup), low, high);
    }
  }
  return random.room + skipped;
}

// A register's codes that have a sign bit, as they were encoded; others are int32.
template <class Code, class W>
struct SignedCodes {
  typename Code::template Encoded<W> encoded;
};

template <class I>
PYCOMM_HD I joined(I codes) {
  return codes;
}
template <class Code, class W>
PYCOMM_HD auto joined(SignedCodes<Code, W> codes) {
  return codes.encoded.with_sign();
}

#if PYCOMM_VECTOR_BYTES >= 32
// The halves of a sum are added so that the code becomes the second byte. The highest is all ones then where the sum has a sign, as it
// has for AVX-512.
template <class Code, class W>
PYCOMM_HD Packed summed(SignedCodes<Code, W> codes) {
  return add_halves(bit_cast<Packed>(codes.encoded.sum), 1 << 8, 2 << Code::kMantissaBits);
}
template <class Code, class W>
PYCOMM_HD Packed narrow(SignedCodes<Code, W> a, SignedCodes<Code, W> b, SignedCodes<Code, W> c, SignedCodes<Code, W> d) {
  using I = typename W::template Of<std::int32_t>;
  constexpr int kSign = 0x01010101 << (Code::kBits - 1);
#if PYCOMM_VECTOR_BYTES == 64
  const Packed ab = bytes_of<1, 3>(summed(a), summed(b)), cd = bytes_of<3, 1>(summed(c), summed(d));
  const Packed codes = _mm512_mask_blend_epi64(0xF0, ab, cd), signs = _mm512_maskz_alignr_epi64(0xFF, cd, ab, 4);
  return bit_cast<Packed>(bit_cast<I>(codes) | (bit_cast<I>(signs) & kSign));
#else
  const Packed ab = pack_words(summed(a), summed(b)), cd = pack_words(summed(c), summed(d));
  const I codes = bit_cast<I>(pack_bytes(_mm256_srli_epi16(ab, 8), _mm256_srli_epi16(cd, 8)));
  const I signs = bit_cast<I>(pack(a.encoded.bits, b.encoded.bits, c.encoded.bits, d.encoded.bits));
  return in_order(bit_cast<Packed>(codes | (signs >> (8 - Code::kBits) & kSign)));
#endif
}
#endif

// Writes the codes of `count` elements, a byte each: what encode(W, index) returns, int32 of -128..127 or SignedCodes.
template <bool has_residual, class Encode>
PYCOMM_HD void write_codes(const Input<has_residual>& input, std::uint8_t* codes, std::size_t count, Encode encode) {
  std::size_t begin = 0;
#if PYCOMM_VECTOR_BYTES >= 32
  constexpr std::size_t n = kLanesOfFloat;
  for (; begin + 4 * n <= count; begin += 4 * n) {
    input.template fetch_in_second_pass<4 * n>(begin);
    const auto a = encode(Floats{}, begin), b = encode(Floats{}, begin + n);
    const auto c = encode(Floats{}, begin + 2 * n), d = encode(Floats{}, begin + 3 * n);
    store_at(codes, begin, narrow(a, b, c, d));
  }
#endif
  for_lanes(count - begin, [&](auto lanes, std::size_t i) PYCOMM_INLINE {
    using W = decltype(lanes);
    if constexpr (W::kLanes > 1) input.template fetch_in_second_pass<W::kLanes>(begin + i);
    store_codes<W>(codes, begin + i, joined(encode(lanes, begin + i)));
  });
}

// Codes of `count` elements, a byte each; scale_at(index) is what the element is encoded with. The residual becomes what is left.
// Inlined, as blocks may be short: what it needs in registers is then there for all of them.
template <class Code, bool stochastic, bool has_residual, class ScaleAt>
PYCOMM_HD void encode_elements(const Input<has_residual>& input, std::uint8_t* codes, std::size_t count, ScaleAt scale_at,
                               [[maybe_unused]] const std::uint16_t* random) {
  write_codes(input, codes, count, [&](auto lanes, std::size_t i) PYCOMM_INLINE {
    using W = decltype(lanes);
    using I = typename W::template Of<std::int32_t>;
    const auto x = load_floats<W>(input.sum(), i);
    I bits16 = W::template splat<std::int32_t>(0);
    if constexpr (stochastic) {
      bits16 = W::template convert<I>(load_at<typename W::template Of<std::uint16_t>>(random, 2 * i));
    }
    const auto encoded = Code::template encode<W, stochastic>(x * scale_at(i).inverse, bits16);
    if constexpr (has_residual) store_at(input.residual, 4 * i, x - encoded.value() * scale_at(i).scale);
    if constexpr (Code::kHasSignBit) {
      return SignedCodes<Code, W>{encoded};
    } else {
      return encoded.with_sign();
    }
  });
}

// Signs of `count` elements, a bit each. The residual becomes what is left.
template <bool has_residual>
PYCOMM_HD void encode_signs(const Input<has_residual>& input, std::uint8_t* packed, std::size_t count, float scale) {
  constexpr std::size_t kAtOnce = 8 * sizeof(signs_of(nullptr));
  std::size_t i = 0;
  for (; i + kAtOnce <= count; i += kAtOnce) {
    input.template fetch_in_second_pass<kAtOnce>(i);
    store_at(packed, i / 8, signs_of(reinterpret_cast<const char*>(input.sum() + i)));
  }
  for (std::size_t byte = i / 8; i < count; ++byte) {
    unsigned signs = 0;
    for (const std::size_t first = i; i < std::min(count, first + 8); ++i) signs |= load_at<std::uint32_t>(input.sum(), 4 * i) >> 31 << (i - first);
    packed[byte] = static_cast<std::uint8_t>(signs);
  }
  if constexpr (has_residual) {
    for_lanes(count, [&](auto lanes, std::size_t at) PYCOMM_INLINE {
      using W = decltype(lanes);
      using U = typename W::template Of<std::uint32_t>;
      const auto x = load_floats<W>(input.sum(), at);
      const U sent = (bit_cast<U>(x) & 0x80000000u) | bit_cast<std::uint32_t>(scale);
      store_at(input.residual, 4 * at, x - bit_cast<typename W::template Of<float>>(sent));
    });
  }
}

// Bytes of one code each -> `bits` for each; `count` codes, and zeros up to a multiple of 8, are there.
template <int bits>
void pack_codes(std::uint8_t* packed, const std::uint8_t* codes, std::size_t count) {
  constexpr int kMask = (1 << bits) - 1;
  const std::size_t bytes = (count * bits + 7) / 8;
  for (std::size_t i = 0; i < bytes; ++i) {
    if constexpr (bits == 4) {
      const auto two = load_at<std::uint16_t>(codes, 2 * i);
      packed[i] = static_cast<std::uint8_t>((two & kMask) | (two >> 4 & 0xF0));
    } else {
      const std::uint32_t four = load_at<std::uint32_t>(codes, 4 * i) & 0x03030303u;
      packed[i] = static_cast<std::uint8_t>(four | four >> 6 | four >> 12 | four >> 18);
    }
  }
}

// -- a payload ---------------------------------------------------------------------------------------------------------

inline void put_bytes(unsigned char* to, const std::uint8_t* from, std::size_t bytes, bool is_streamed) {
  if (is_streamed) {
    run_copy_streamed(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

// Calls coder.run_chunk for as many whole blocks of the job's at a time as a chunk has room for, or coder.run_long for one.
template <class Job, class Coder>
void run_chunks(const Job& job, Coder& coder) {
  const std::size_t per_chunk = std::max<std::size_t>(1, kChunk / job.block_numel);
  for (std::size_t block = job.first_block; block < job.last_block; block += per_chunk) {
    const std::size_t begin = block * job.block_numel;
    const std::size_t last = std::min(job.last_block, block + per_chunk);
    const std::size_t end = std::min(job.numel, last * job.block_numel);
    if (job.block_numel > kChunk) {
      coder.run_long(block, begin, end);
    } else {
      coder.run_chunk(block, last, begin, end);
    }
  }
}

template <class Format, bool stochastic, bool has_residual>
struct Quantizer {
  using I = typename Floats::Of<std::int32_t>;
  static constexpr bool kIsSign = Format::kFormat == PayloadFormat::kSign;

  const QuantizeJob job;  // a copy: no store can change it
  const PayloadLayout layout{job.format, job.numel, job.block_numel};
  const ReadAhead ahead{reads_by_pages(4 * job.numel)};
  alignas(64) std::uint8_t codes[kChunk];
  alignas(64) std::uint8_t packed[kChunk];
  alignas(64) float scales[kBlocks], inverses[kBlocks];
  I most[Format::kIsMx ? kBlocks : 1] = {};
  Random random;
  const std::uint16_t* drawn = random.room;

  explicit Quantizer(const QuantizeJob& job) : job(job) {}

  Input<has_residual> input_at(std::size_t begin) const {
    return {ahead, job.flat + begin, has_residual ? job.residual + begin : nullptr};
  }

  // What the scale of a block of `count` elements follows from.
  PYCOMM_HD std::int32_t reach_of(std::size_t begin, std::size_t count) const {
    if constexpr (kIsSign) {
      return bit_cast<std::int32_t>(sum_magnitudes(input_at(begin), count) / static_cast<float>(count));
    } else {
      return largest_lane(find_amax(input_at(begin), count));
    }
  }

  // Finds and writes the scales of the blocks from `block` on, elements [begin, end). Not of MX.
  PYCOMM_HD void make_scales(std::size_t block, std::size_t begin, std::size_t end) {
    std::size_t i = 0;
    for (std::size_t at = begin; at < end; at += job.block_numel, ++i) {
      const auto made = Format::template scale<Scalar>(reach_of(at, std::min(job.block_numel, end - at)));
      scales[i] = made.scale, inverses[i] = made.inverse;
      store_at(job.payload, 4 * (block + i), made.stored);
    }
  }

  // As make_scales(), those of MX, which are so many that they are made a register at a time. Returns whether all are finite, and
  // none so large that its codes saturate; what is behind the last is of an earlier chunk, or zeros, and counts as well.
  PYCOMM_HD bool make_mx_scales(std::size_t block, std::size_t begin, std::size_t end) {
    std::size_t found = 0;
    for (std::size_t at = begin; at < end; at += kLeastBlock) {  // of a whole block the compiler knows the length
      most[found++] = end - at >= kLeastBlock ? find_amax(input_at(at), kLeastBlock) : find_amax(input_at(at), end - at);
    }
    alignas(64) std::uint8_t stored[kBlocks];
    I largest = {};
    for (std::size_t i = 0; i < found; i += kLanesOfFloat) {
      const I reach = largest_of_each<kLanesOfFloat>(most + i);
      const auto made = Format::template scale<Floats>(reach);
      largest = Floats::larger(largest, reach);
      store_at(scales, 4 * i, made.scale);
      store_at(inverses, 4 * i, made.inverse);
      store_codes<Floats>(stored, i, bit_cast<I>(made.stored));
    }
    std::memcpy(job.payload + block, stored, found);
    return largest_lane(largest) <= largest_mx_amax(Format::Code::kLargestBits);
  }

  void draw([[maybe_unused]] std::size_t begin, [[maybe_unused]] std::size_t count) {
    if constexpr (stochastic) drawn = fill_random(random, job.seed, job.offset + begin, count);
  }

  // Elements [begin, begin + count) of the i-th block that there are scales of, to codes[at ...]; the chunk's random numbers are drawn.
  PYCOMM_HD void encode(std::size_t at, std::size_t begin, std::size_t count, std::size_t i) {
    const float scale = scales[i], inverse = inverses[i];
    const Input<has_residual> input = input_at(begin);
    if (differs(scale, scale)) {
      kIsSign ? std::memset(packed + at / 8, 0, (count + 7) / 8) : std::memset(codes + at, 0, count);
      if constexpr (has_residual) std::memset(input.residual, 0, 4 * count);
    } else if constexpr (kIsSign) {
      encode_signs(input, packed + at / 8, count, scale);  // blocks are of 32 elements, so they begin at a byte
    } else {
      const auto scale_at = [scale, inverse](std::size_t) PYCOMM_INLINE { return BlockScale<Scalar>{scale, inverse, 0}; };
      encode_elements<typename Format::Code, stochastic>(input, codes + at, count, scale_at, drawn + at);
    }
  }

  // As encode(), the blocks of a chunk of MX, if make_mx_scales() says so: as one, so that four registers are narrowed together.
  PYCOMM_HD void encode_mx(std::size_t begin, std::size_t end) {
    const auto scale_at = [this](std::size_t i) PYCOMM_INLINE {
      return BlockScale<Scalar>{scales[i / kLeastBlock], inverses[i / kLeastBlock], 0};
    };
    encode_elements<typename Format::Code::Bounded, stochastic>(input_at(begin), codes, end - begin, scale_at, drawn);
  }

  // Writes codes[0, count) where those of element `begin` belong.
  void put(std::size_t begin, std::size_t count) {
    unsigned char* const to = job.payload + layout.codes_offset + layout.code_bytes(begin);
    constexpr int bits = kCodeBits[static_cast<int>(Format::kFormat)];
    if constexpr (bits == 8) return put_bytes(to, codes, count, job.is_streamed);
    if constexpr (bits == 2 || bits == 4) {
      std::memset(codes + count, 0, -count % 8);
      pack_codes<bits>(packed, codes, count);
    }
    put_bytes(to, packed, layout.code_bytes(count), job.is_streamed);
  }

  // A block that is longer than a chunk.
  void run_long(std::size_t block, std::size_t begin, std::size_t end) {
    make_scales(block, begin, end);
    for (std::size_t at = begin; at < end; at += kChunk) {
      const std::size_t count = std::min(kChunk, end - at);
      draw(at, count);
      encode(0, at, count, 0);
      put(at, count);
    }
  }

  // The blocks of a chunk from `block` on, elements [begin, end).
  void run_chunk(std::size_t block, [[maybe_unused]] std::size_t last, std::size_t begin, std::size_t end) {
    draw(begin, end - begin);
    bool is_done = false;
    if constexpr (Format::kIsMx) {
      is_done = make_mx_scales(block, begin, end);
      if (is_done) encode_mx(begin, end);
    } else {
      make_scales(block, begin, end);
    }
    for (std::size_t at = begin, i = 0; at < end && !is_done; at += job.block_numel, ++i) {
      encode(at - begin, at, std::min(job.block_numel, end - at), i);
    }
    put(begin, end - begin);
  }

  void run() {
    run_chunks(job, *this);
    if (job.last_block == layout.num_blocks) {
      const std::size_t scales = layout.num_blocks * layout.scale_bytes;
      std::memset(job.payload + scales, 0, layout.codes_offset - scales);
    }
  }
};

template <class Format, bool stochastic>
void run_quantize_rounded(const QuantizeJob& job) {
  if (job.residual != nullptr) {
    Quantizer<Format, stochastic, true>(job).run();
  } else {
    Quantizer<Format, stochastic, false>(job).run();
  }
}

template <class Format>
void run_quantize(const QuantizeJob& job) {
  if constexpr (Format::kFormat != PayloadFormat::kSign) {
    if (job.is_stochastic) return run_quantize_rounded<Format, true>(job);
  }
  run_quantize_rounded<Format, false>(job);
}

}  // namespace pycomm::PYCOMM_ISA
