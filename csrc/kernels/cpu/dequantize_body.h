// dequantize() for one instruction set: see codec_body.h, which includes this after quantize_body.h.
//
// The idea: codes of less than a byte are first spread to one byte each, a chunk at a time in the L1 cache; then one
// loop multiplies, adds and writes. Bytes moved per element: kCodeBits / 8 read, 4 written, and 4 more read if it adds.

namespace pycomm::PYCOMM_ISA {

// `bits` for each code -> a byte each; of integers with the sign, as an int8. Writes up to 7 codes more than `count`.
template <int bits, bool is_integer>
void spread_codes(std::uint8_t* codes, const std::uint8_t* packed, std::size_t count) {
  constexpr unsigned kSign = is_integer ? 1 << (bits - 1) : 0, kAbove = (256 - (1 << bits)) >> (bits - 1);  // what makes of a sign all bits above the code
  const std::size_t bytes = (count * bits + 7) / 8;
  for (std::size_t i = 0; i < bytes; ++i) {
    if constexpr (bits == 4) {
      const unsigned one = packed[i], two = (one | one << 4) & 0x0F0F, signs = two & kSign * 0x0101;
      store_at(codes, 2 * i, static_cast<std::uint16_t>(two | signs * kAbove));
    } else {
      const std::uint32_t one = packed[i], four = (one | one << 6 | one << 12 | one << 18) & 0x03030303u, signs = four & kSign * 0x01010101;
      store_at(codes, 4 * i, static_cast<std::uint32_t>(four | signs * kAbove));
    }
  }
}

// How values get to where they belong.
enum class Put { kStored, kStreamed, kAdded, kAddedByPages };

// Adds `value` to, or writes it over, the elements at `to`. Every NaN becomes the one.
template <class W, Put put>
PYCOMM_HD void put_values(float* to, std::size_t i, typename W::template Of<float> value) {
  if constexpr (put == Put::kAdded || put == Put::kAddedByPages) {
    constexpr ReadAhead ahead{put == Put::kAddedByPages};
    if constexpr (W::kLanes > 1) ahead.fetch<sizeof(value)>(to + i);
    value = load_floats<W>(to, i) + value;
  }
  value = Native<float>::encode<W>(value);
  if constexpr (put == Put::kStreamed && W::kLanes > 1) {
    store_streamed(reinterpret_cast<char*>(to + i), value);
  } else {
    store_at(to, 4 * i, value);
  }
}

// What floats of 8 bits are multiplied by as float16_of() has them; see there.
template <class Code>
inline constexpr float kOfHalves = 1.0f;
template <bool saturates>
inline constexpr float kOfHalves<FloatCode<E4M3FNFormat, saturates>> = 256.0f;

#if PYCOMM_VECTOR_BYTES >= 32
// Whether codes are floats of 8 bits: those the hardware can decode, as float16.
template <class Code>
inline constexpr bool kIsFloat8 = false;
template <class F, bool saturates>
inline constexpr bool kIsFloat8<FloatCode<F, saturates>> = F::kSignBit == 128;

// e5m2 is float16's upper byte. e4m3 has a bit of the exponent less: its other bits, in their places in float16, are the
// number divided by 2^8, but for NaN.
template <class F, bool saturates>
PYCOMM_HD Packed float16_of(FloatCode<F, saturates>, HalfRegister codes) {
  using U = VectorOf<std::uint16_t, PYCOMM_VECTOR_BYTES / 2>::type;
  const U words = bit_cast<U>(bytes_to_words(codes));
  if constexpr (F::kExponentBits == 5) return bit_cast<Packed>(words << 8);
  const U bits = words << 7;  // the sign is in the two highest, of which the lower is to be set for NaN: what of ones alone carries there
  return bit_cast<Packed>(bits ^ ((bits + 0x80) & 0x4000));
}

// Elements [0, n) for as many whole pairs of registers as `count` has; returns n. scale_at(index) times kOfHalves is finite: a power
// of two, so the product rounds as that of the number itself does.
template <class Code, Put put, class ScaleAt>
PYCOMM_HD std::size_t decode_float8(float* to, const std::uint8_t* codes, std::size_t count, ScaleAt scale_at) {
  using V = typename Floats::Of<float>;
  std::size_t i = 0;
  for (; i + 2 * kLanesOfFloat <= count; i += 2 * kLanesOfFloat) {
    const Packed halves = float16_of(Code{}, load_at<HalfRegister>(codes, i));
    const float scale = scale_at(i) * kOfHalves<Code>;
    put_values<Floats, put>(to, i, bit_cast<V>(half_to_float(lower_half(halves))) * scale);
    put_values<Floats, put>(to, i + kLanesOfFloat, bit_cast<V>(half_to_float(upper_half(halves))) * scale);
  }
  return i;
}
#endif

// The values of the codes from the i-th on. The sixteen of e2m1 fit in a register, or but for the sign in half of one: they are looked up.
template <class W, class Code>
PYCOMM_HD auto decode_at(const std::uint8_t* from, std::size_t i) {
  using I = typename W::template Of<std::int32_t>;
  if constexpr (!Code::kHasSignBit) {  // an int8
    const auto numbers = load_at<typename W::template Of<std::int8_t>>(from, i);
    return W::template convert<typename W::template Of<float>>(W::template convert<I>(numbers));
  } else {
    const I codes = load_codes<W>(from, i);
    if constexpr (W::kLanes > 1 && Code::kBits == 4) {
#if PYCOMM_VECTOR_BYTES == 64
      const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
      return bit_cast<typename W::template Of<float>>(_mm512_maskz_permutexvar_ps(0xFFFF, bit_cast<__m512i>(codes), values));
#elif PYCOMM_VECTOR_BYTES == 32
      const __m256 magnitudes = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), bit_cast<__m256i>(codes));
      return bit_cast<typename W::template Of<float>>(bit_cast<I>(magnitudes) | (codes & 8) << 28);
#endif
    }
    return Code::template decode<W>(codes);
  }
}

// scale_at(index) is what an element is multiplied by, `is_finite` whether it times kOfHalves is, for all of them.
template <class Code, Put put, class ScaleAt>
PYCOMM_HD void decode_elements(float* to, const std::uint8_t* codes, std::size_t count, ScaleAt scale_at, [[maybe_unused]] bool is_finite) {
  std::size_t done = 0;
#if PYCOMM_VECTOR_BYTES >= 32
  if constexpr (kIsFloat8<Code>) {
    if (is_finite) done = decode_float8<Code, put>(to, codes, count, scale_at);
  }
#endif
  for_lanes(count - done, [&](auto lanes, std::size_t i) PYCOMM_INLINE {
    using W = decltype(lanes);
    put_values<W, put>(to, done + i, decode_at<W, Code>(codes, done + i) * scale_at(done + i));
  });
}

// Element i has bit i of `packed`; vectors start at bits whose number is a multiple of their lanes, so of 4.
template <Put put>
void decode_signs(float* to, const std::uint8_t* packed, std::size_t count, float scale) {
  for_lanes(count, [&](auto lanes, std::size_t i) PYCOMM_INLINE {
    using W = decltype(lanes);
    using U = typename W::template Of<std::uint32_t>;
    std::uint32_t word = static_cast<std::uint32_t>(packed[i / 8]) >> i % 8;
    U shifts = W::template splat<std::uint32_t>(31);
    if constexpr (W::kLanes > 1) {
      if constexpr (W::kLanes == 16) word |= static_cast<std::uint32_t>(packed[i / 8 + 1]) << 8;
      std::uint32_t each[W::kLanes];
      for (int lane = 0; lane < W::kLanes; ++lane) each[lane] = static_cast<std::uint32_t>(31 - lane);
      std::memcpy(&shifts, each, sizeof(shifts));
    }
    const U sign = (W::template splat<std::uint32_t>(word) << shifts) & 0x80000000u;
    const U bits = sign ^ W::template splat<std::uint32_t>(bit_cast<std::uint32_t>(scale));
    put_values<W, put>(to, i, bit_cast<typename W::template Of<float>>(bits));
  });
}

template <class Format, Put put>
struct Dequantizer {
  static constexpr int kBits = kCodeBits[static_cast<int>(Format::kFormat)];
  const DequantizeJob job;  // a copy: no store can change it
  const PayloadLayout layout{job.format, job.numel, job.block_numel};
  alignas(64) std::uint8_t spread[kChunk + 8];

  explicit Dequantizer(const DequantizeJob& job) : job(job) {}

  // Not of MX.
  float scale_of(std::size_t block) const { return load_at<float>(job.payload, 4 * block) * job.factor; }

  // Elements [begin, begin + count) of one block, whose codes are at `codes`, a byte each; or those of signs, a bit each.
  PYCOMM_HD void decode(const std::uint8_t* codes, std::size_t begin, std::size_t count, float scale) const {
    if constexpr (kBits == 1) {
      decode_signs<put>(job.flat + begin, codes, count, scale);
    } else {
      const float largest = scale * kOfHalves<typename Format::Code>;
      const auto scale_at = [scale](std::size_t) PYCOMM_INLINE { return scale; };
      decode_elements<typename Format::Code, put>(job.flat + begin, codes, count, scale_at, largest - largest == 0);
    }
  }

  // The blocks [block, last) of a chunk of MX, elements [begin, end): they are so many that their scales are made a register at a time.
  PYCOMM_HD void decode_mx(const std::uint8_t* codes, std::size_t block, std::size_t last, std::size_t begin, std::size_t end) const {
    using I = typename Floats::Of<std::int32_t>;
    using V = typename Floats::Of<float>;
    alignas(64) std::uint8_t stored[kBlocks] = {};
    alignas(64) float scales[kBlocks];
    std::memcpy(stored, job.payload + block, last - block);
    I largest = {};
    for (std::size_t i = 0; i < last - block; i += kLanesOfFloat) {
      const V scale = mx_scale<Floats>(bit_cast<typename Floats::Of<std::uint32_t>>(load_codes<Floats>(stored, i))) * job.factor;
      largest = Floats::larger(largest, bit_cast<I>(scale * kOfHalves<typename Format::Code>) & 0x7FFFFFFF);
      store_at(scales, 4 * i, scale);
    }
    const auto scale_at = [&scales](std::size_t i) PYCOMM_INLINE { return scales[i / kLeastBlock]; };
    decode_elements<typename Format::Code, put>(job.flat + begin, codes, end - begin, scale_at, largest_lane(largest) < kInfinityBits);
  }

  // The codes of `count` elements from `begin` on, for decode().
  const std::uint8_t* codes_of(std::size_t begin, std::size_t count) {
    const unsigned char* const from = job.payload + layout.codes_offset + layout.code_bytes(begin);
    if constexpr (kBits == 1 || kBits == 8) {
      return from;
    } else {
      spread_codes<kBits, !Format::Code::kHasSignBit>(spread, from, count);
      return spread;
    }
  }

  // A block that is longer than a chunk.
  void run_long(std::size_t block, std::size_t begin, std::size_t end) {
    const float scale = scale_of(block);
    for (; begin < end; begin += kChunk) {
      const std::size_t count = std::min(kChunk, end - begin);
      decode(codes_of(begin, count), begin, count, scale);
    }
  }

  // The blocks [block, last) of a chunk, elements [begin, end).
  void run_chunk(std::size_t block, std::size_t last, std::size_t begin, std::size_t end) {
    const std::uint8_t* codes = codes_of(begin, end - begin);
    if constexpr (Format::kIsMx) {
      decode_mx(codes, block, last, begin, end);
    } else {
      for (std::size_t at = begin; block < last; ++block, at += job.block_numel) {
        const std::size_t count = std::min(job.block_numel, end - at);
        decode(codes, at, count, scale_of(block));
        codes += kBits == 1 ? count / 8 : count;
      }
    }
  }

  void run() { run_chunks(job, *this); }
};

template <class Format>
void run_dequantize(const DequantizeJob& job) {
  // A vector is streamed to an address that is a multiple of its size; blocks are of 32 elements and so keep that.
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(job.flat) % PYCOMM_VECTOR_BYTES == 0;
  if (job.is_added && reads_by_pages(4 * job.numel)) return Dequantizer<Format, Put::kAddedByPages>(job).run();
  if (job.is_added) return Dequantizer<Format, Put::kAdded>(job).run();
  if (job.is_streamed && is_aligned) return Dequantizer<Format, Put::kStreamed>(job).run();
  Dequantizer<Format, Put::kStored>(job).run();
}

}  // namespace pycomm::PYCOMM_ISA
