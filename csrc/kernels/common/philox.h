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

// One round: on one counter, or on arrays of them that the compiler turns into vectors.
PYCOMM_HD void philox_round(std::uint32_t word[4], std::uint32_t key0, std::uint32_t key1) {
  const std::uint64_t even = std::uint64_t{0xD2511F53u} * word[0];
  const std::uint64_t odd = std::uint64_t{0xCD9E8D57u} * word[2];
  const std::uint32_t first = static_cast<std::uint32_t>(odd >> 32) ^ word[1] ^ key0;
  const std::uint32_t third = static_cast<std::uint32_t>(even >> 32) ^ word[3] ^ key1;
  word[0] = first;
  word[1] = static_cast<std::uint32_t>(odd);
  word[2] = third;
  word[3] = static_cast<std::uint32_t>(even);
}

inline constexpr int kPhiloxRounds = 10;
inline constexpr std::uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;

// The 128 bits of one group.
PYCOMM_HD PhiloxWords philox(std::uint64_t seed, std::uint64_t group) {
  PhiloxWords x = {{static_cast<std::uint32_t>(group), static_cast<std::uint32_t>(group >> 32), 0, 0}};
  std::uint32_t key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round, key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1) {
    philox_round(x.word, key0, key1);
  }
  return x;
}

}  // namespace pycomm
