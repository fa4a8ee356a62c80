// What is told to the processor's caches, and what they are asked.
//
// [Note: by turns]
// A core that stores to a line which another one has waits for it, and stores leave it in their order. So the lines of a whole block
// are asked for before the first is written; and where a rank fills one window and reads another, it does so by turns, a block
// each, so that the lines which come from the other core arrive while the ones that go there are being asked for. (Two
// ranks on Sapphire Rapids, 1 MiB, one window after the other and by turns: 127 and 101 us; 16 MiB: 2380 and 1980.)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../kernels/copy.h"
#include "../kernels/read_ahead.h"
#include "../kernels/reduce.h"
#include "layout.h"

namespace pycomm::shm {

inline constexpr std::size_t kBlock = 1024;  // by turns, in bytes

// Asks for a cache line that this core will soon write. None of the addresses here need exist.
inline void prefetch_for_write(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(line)));  // what __builtin_prefetch emits only with -mprfchw
#else
  __builtin_prefetch(line, 1);
#endif
}

// The same of a block; of longer data its lines would be gone again before they are written.
inline void ask_to_write(void* data, std::size_t bytes) {
  if (bytes > kBlock) return;
  for (std::size_t line = 0; line < bytes; line += kLine) prefetch_for_write(static_cast<char*>(data) + line);
}

// How far ahead of what a core copies it asks for the lines of a caller's long buffer, which may lie in memory: a processor that
// does so by itself stops at the end of a page and begins anew in the next.
inline constexpr std::size_t kReadAhead = kPage;
// By turns half of what it does meanwhile is something else. (Two ranks on Zen 5, an all_reduce of 1 MiB that an L3 holds half of: 0.65 of the
// time that it takes where only the next block is asked for.)
inline constexpr std::size_t kReadAheadByTurns = 2 * kPage;
inline constexpr std::size_t kAskFrom = 768;  // less has come by the time that it is asked for

inline void ask_to_read(const void* data, std::size_t bytes) {
  for (std::size_t line = 0; line < bytes; line += kLine) __builtin_prefetch(static_cast<const char*>(data) + line);
}

// Copies by plain stores what a caller has, to where another core or another rank of this one reads it; `by_pages`, see
// [Note: reading ahead].
inline void copy_by_blocks(void* to, const void* from, std::size_t bytes, bool by_pages = false) {
  const std::size_t ahead = bytes > kBlock ? kReadAhead : kReadAheadByTurns;
  for (std::size_t offset = 0; offset < bytes; offset += kBlock) {
    const std::size_t length = std::min(kBlock, bytes - offset);
    char* const target = static_cast<char*>(to) + offset;
    const char* const source = static_cast<const char*>(from) + offset;
    if (length >= kAskFrom) {
      ask_to_write(target, length);
      if (by_pages) {
        ReadAhead{true}.fetch<kBlock>(source);
      } else {
        ask_to_read(source + ahead, length);
      }
    }
    std::memcpy(target, source, of_any_length(length));
  }
}

// The other way: copies by plain stores what another core has staged to where only this one reads it.
inline void keep_by_blocks(void* to, const void* from, std::size_t bytes) {
  for (std::size_t offset = 0; offset < bytes; offset += kBlock) {
    const std::size_t length = std::min(kBlock, bytes - offset);
    char* const target = static_cast<char*>(to) + offset;
    const char* const source = static_cast<const char*>(from) + offset;
    ask_to_write(target, length);
    std::memcpy(target, source, of_any_length(length));
  }
}

// Copies by non-temporal stores, or by plain ones.
inline void copy_by(bool streams, void* to, const void* from, std::size_t bytes) {
  if (streams) return copy_streamed(to, from, bytes);
  copy_plain(to, from, bytes);
}

// How a rank writes what other cores will read, and keeps what they have written.
//
// [Note: strings]
// A plain store to a line that another core holds fetches the line first, only to overwrite it. A `rep movsb` of 4 KiB or more does not: it takes
// the line from the other core without its bytes. A non-temporal store does not either, but sends the bytes to memory, from where they are
// read. (Zen 5, 64 KiB from one core to another through a ring of 2 MiB: plain 1.5, strings 1.3, streamed 3.9 us within one L3;
// 10.3, 4.5 and 5.6 between two.) What came so is kept so: a target that lies in no L2 is not fetched either. To ask meanwhile for what comes next costs
// more than it gains. Where a processor has no such instruction, or a slow one, trials do not choose it.
enum class Stores : unsigned char { kPlain, kStrings, kStreamed };

inline constexpr std::size_t kString = 4096;  // shorter ones fetch the lines

void copy_by_strings(void* to, const void* from, std::size_t bytes);  // of one at least

// Whether non-temporal stores are the faster way to write what will not stay in the caches. Found out once a process, in
// some 20 ms: they spare reading the line. (Sapphire Rapids, 4 MiB that no cache holds: half the time; 64 KiB that an L2 holds: 1.4 times.)
bool memory_prefers_streams();

// Whether `data`, many pages long, lies in no cache, by a few lines of it: the middle ones of pages, read in 80 ns or in 450 (AMD's Zen 3, all of them).
// False where that cannot be told.
bool lies_in_memory(const void* data, std::size_t bytes);

inline constexpr std::size_t kLongFrom = 4u << 20;  // a result of so many bytes leaves the caches anyway
inline bool is_long(std::size_t bytes) { return bytes >= kLongFrom; }

}  // namespace pycomm::shm
