// Random numbers that depend on (seed, index of the element) alone: Philox4x32-10 (Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", SC 2011). The same on CPU and GPU, however the elements are shared out.
#pragma once

#include "portable.h"

namespace pycomm {

// Elements that share one evaluation: 8 times 16 bits. Element i takes half i % 2 of word i / 2 % 4 of group i / 8.
inline constexpr int kPhiloxGroup = 8;

struct PhiloxWords {
  std::uint32_t word[4];
};

// One round, on one counter or, in vectors, on several. A word is the low half of a 64-bit Word, noise is in the upper one;
// multiply(a, b) is the product of two low halves.
template <class Word, class Multiply>
PYCOMM_HD void philox_round(Word word[4], std::uint32_t key0, std::uint32_t key1, Multiply multiply) {
  const Word even = multiply(word[0], 0xD2511F53u);
  const Word odd = multiply(word[2], 0xCD9E8D57u);
  word[0] = (odd >> 32) ^ word[1] ^ std::uint64_t{key0};
  word[1] = odd;
  word[2] = (even >> 32) ^ word[3] ^ std::uint64_t{key1};
  word[3] = even;
}

inline constexpr int kPhiloxRounds = 10;
inline constexpr std::uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;

// The 128 bits of one group.
PYCOMM_HD PhiloxWords philox(std::uint64_t seed, std::uint64_t group) {
  std::uint64_t word[4] = {group, group >> 32, 0, 0};
  std::uint32_t key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round, key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1) {
    philox_round(word, key0, key1, [](std::uint64_t a, std::uint32_t b) { return std::uint64_t{static_cast<std::uint32_t>(a)} * b; });
  }
  PhiloxWords x;
  for (int i = 0; i < 4; ++i) x.word[i] = static_cast<std::uint32_t>(word[i]);
  return x;
}

}  // namespace pycomm
