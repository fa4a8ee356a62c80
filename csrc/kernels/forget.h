// For trials of what memory is like that no cache holds.
#pragma once

#include <cstddef>

namespace pycomm {

// Throws `bytes` at `memory` out of all caches, where the processor has an instruction for that.
inline void forget([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) {
#if defined(__x86_64__)
  constexpr std::size_t kLineBytes = 64;
  for (std::size_t line = 0; line < bytes; line += kLineBytes) __builtin_ia32_clflush(static_cast<char*>(memory) + line);
  __builtin_ia32_mfence();
#endif
}

}  // namespace pycomm
