// Plain copies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pycomm {

// The same length, of which the compiler no longer knows that it is short. Else GCC, tuned for any processor, makes of a memcpy
// up to 8 KiB a `rep movsq`, which on Sapphire Rapids takes twice the time of the C library's.
inline std::size_t of_any_length(std::size_t bytes) {
  asm("" : "+r"(bytes));
  return bytes;
}

// memmove, for any length, of buffers that are one or do not touch. The C library copies what is longer than a few KiB and fits an L2
// by `rep movsb`, which on AMD's Zen 3 takes 12 times as long where the target is 1 to 31 bytes ahead of the source within a page, as
// a part of a tensor of odd length may be. So such copies are cut.
inline void copy_plain(void* to, const void* from, std::size_t bytes) {
  constexpr std::size_t kCut = 2048;
  const std::uintptr_t ahead = (reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from)) % 4096;
  if (ahead == 0 || ahead >= 64) {
    std::memmove(to, from, bytes);
    return;
  }
  for (std::size_t at = 0; at < bytes; at += kCut)
    std::memmove(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, of_any_length(std::min(kCut, bytes - at)));
}

}  // namespace pycomm
