// How a loop over a long array asks for what it will read.
//
// [Note: reading ahead]
// The hardware fetches ahead of a loop only to the end of a page of 4 KiB. So a loop asks for lines further on, those shortly
// before they are needed: memory is read 1.3 to 1.4 times as fast. Or by pages: for lines of eight pages in turn (as glibc's
// memcpy goes over four), while it works through the eight before them. Sapphire Rapids, where one stream by itself is slower
// than memory, reads 1.2 to 1.4 times as fast again that way, and a quarter slower where the lines were in a cache. Zen 5
// takes 1.3 to 1.7 times as long. So what no cache holds is read by pages where a trial finds that to be faster.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/portable.h"

namespace pycomm {

inline constexpr int kToL1 = 3, kToL2 = 2;  // the compiler's numbers for where a line is to come

class ReadAhead {
 public:
  PYCOMM_HD explicit constexpr ReadAhead(bool by_pages) : by_pages_(by_pages) {}
  PYCOMM_HD constexpr bool by_pages() const { return by_pages_; }

  // For a loop that takes the `bytes` at `from` now, and then those behind them. (By numbers: what is asked for may lie
  // behind the end, which does no harm.)
  template <std::size_t bytes, std::size_t near_bytes = 2048, bool is_written = false, int where = kToL1>
  PYCOMM_HD void fetch(const void* from) const {
    const auto address = reinterpret_cast<std::uintptr_t>(from);
    if (by_pages_) {
      const std::uintptr_t next = (address & -kPagesBytes) + kPagesBytes, line = address % kPagesBytes / 64;
#pragma GCC unroll 16
      for (std::uintptr_t i = line; i < line + (bytes + 63) / 64; ++i) {
        __builtin_prefetch(reinterpret_cast<const void*>(next + i % kPages * 4096 + i / kPages * 64), is_written, kToL2);
      }
    } else {
#pragma GCC unroll 16
      for (std::size_t line = 0; line < bytes; line += 64) {
        __builtin_prefetch(reinterpret_cast<const void*>(address + near_bytes + line), is_written, where);
      }
    }
  }

 private:
  static constexpr std::uintptr_t kPages = 8, kPagesBytes = kPages * 4096;
  const bool by_pages_;
};

// Whether reading by pages is the faster way. Found out once a process, in a few ms.
bool pages_win();

}  // namespace pycomm
