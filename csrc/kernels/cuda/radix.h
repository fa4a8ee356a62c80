// The digits of the radix selection of topk.cu, and what is known after some of them.
#pragma once

#include "../common/select.h"

namespace pycomm {

// A radix selection looks at the 31 bits in three goes, the highest first.
struct RadixDigit {
  int shift, bits;
};
inline constexpr int kRadixRounds = 3, kRadixBins = 1 << 11;
PYCOMM_HD constexpr RadixDigit radix_digit(int round) {
  return round == 0 ? RadixDigit{20, 11} : round == 1 ? RadixDigit{10, 10} : RadixDigit{0, 10};
}

// What is known of the rank-th largest magnitude after some of the digits.
struct RadixPrefix {
  std::int32_t key;    // its first bits
  std::int32_t known;  // which bits those are
  std::size_t above;   // elements whose first bits are larger

  PYCOMM_HD bool holds(std::int32_t magnitude) const { return (magnitude & known) == key; }

  PYCOMM_HD void append(RadixDigit digit, std::int32_t bin) {
    key |= bin << digit.shift;
    known |= ((1 << digit.bits) - 1) << digit.shift;
  }
};

PYCOMM_HD std::int32_t radix_bin(RadixDigit digit, std::int32_t magnitude) {
  return magnitude >> digit.shift & ((1 << digit.bits) - 1);
}

}  // namespace pycomm
