// The payload of a quantized tensor: which formats there are, and where their bytes lie.
//
//   scales   one for each block of `block_numel` elements: float32, or for the mx formats one byte e: 2^(e - 127)
//   padding  zeros, up to a multiple of 64 bytes
//   codes    `bits` for each element, in order, the first in the lowest bits; the last byte is filled up with zeros
//
// pycomm/ops/_formats.py says the same to Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycomm {

enum class PayloadFormat : std::uint8_t {
  kInt8 = 0, kInt4 = 1, kTernary = 2, kFp8E4M3 = 3, kFp8E5M2 = 4, kMxfp8 = 5, kMxfp4 = 6, kSign = 7,
};
inline constexpr int kPayloadFormats = 8;

inline constexpr int kCodeBits[kPayloadFormats] = {8, 4, 2, 8, 8, 8, 4, 1};
inline constexpr bool is_mx(PayloadFormat format) {
  return format == PayloadFormat::kMxfp8 || format == PayloadFormat::kMxfp4;
}

// Where the parts of a payload are. `block_numel` is a multiple of 32, so that a block's codes begin with a byte.
struct PayloadLayout {
  std::size_t numel, block_numel, num_blocks, scale_bytes, codes_offset, bytes;
  int bits;

  constexpr PayloadLayout(PayloadFormat format, std::size_t numel, std::size_t block_numel)
      : numel(numel),
        block_numel(block_numel),
        num_blocks(numel / block_numel + (numel % block_numel != 0)),
        scale_bytes(is_mx(format) ? 1 : 4),
        codes_offset((num_blocks * scale_bytes + 63) / 64 * 64),
        bytes(0),
        bits(kCodeBits[static_cast<int>(format)]) {
    bytes = codes_offset + code_bytes(numel);
  }

  constexpr std::size_t code_bytes(std::size_t elements) const {
    return (elements * static_cast<std::size_t>(bits) + 7) / 8;
  }
};

}  // namespace pycomm
