// Which results are written past the caches.
//
// [Note: results past the caches]
// That spares reading lines which are to be overwritten, where no cache holds them: AMD's Zen 3, all_gather of 512 KiB to 2 MiB into buffers used
// in turn, 0.6 to 0.9 of the time. Streamed though the caches hold it, a result takes 1.4. A long one never is in them. Where a shorter one lies, a rank
// finds out as the call begins; but what was streamed lies in memory the next time for that very reason, though the caches might hold it by
// now. (Zen 5, all_gather of 256 KiB into 16 buffers of 512 KiB: 29 us for good, where 20 would do.) So it tries by turns: some calls write
// plainly whatever it finds, others stream what lies in memory, and the rest go as took less, from when all ranks had come. (By the time of
// the copies alone plain ones win too often, as what they leave in the caches is written back afterwards.) The ranks need not agree.
//
// [Note: results in others' caches]
// What a rank writes into the buffers of others lies in their caches as a rule, and before a plain store changes a line it has to come from there.
// From 2 MiB on it may take less time to write past the caches (Zen 5, an all_reduce of shared buffers of 2 to 64 MiB: between two L3s 0.5 to 0.8
// of the time, within one 1.0 to 1.2); which of the two, is found out in the same way.
#pragma once

#include <cstddef>
#include <utility>

#include "by_length.h"
#include "few_ways.h"
#include "stores.h"

namespace pycomm::shm {

// The result of one call, on one rank.
class Result {
 public:
  explicit Result(bool is_streamed, Attempt<2> attempt = {}) : is_streamed_(is_streamed), attempt_(std::move(attempt)) {}

  bool is_streamed() const { return is_streamed_; }
  // From now on nothing is waited for but what takes its time; until the end of its scope.
  void begin() { attempt_.begin(); }

 private:
  const bool is_streamed_;
  Attempt<2> attempt_;
};

// The results of calls of one kind.
class Results {
 public:
  static constexpr unsigned kTriedAtATime = 16;

  // Of `bytes` at `output`; the message is as long or longer.
  Result of(const void* output, std::size_t bytes, std::size_t message_bytes) {
    if (is_long(message_bytes)) return Result(memory_prefers_streams());
    if (bytes < kProbedFrom || !memory_prefers_streams()) return Result(false);
    Attempt<2> attempt(ways_.of(message_bytes), bytes, kTriedAtATime);
    const bool is_streamed = attempt.way() == kStreams && lies_in_memory(output, bytes);
    return Result(is_streamed, std::move(attempt));
  }
  // Of a message of `bytes`, in the buffers of others.
  Result of_others(std::size_t bytes) {
    if (bytes < kOthersFrom) return Result(false);
    Attempt<2> attempt(others_ways_.of(bytes), bytes, kTriedAtATime);
    const bool is_streamed = attempt.way() == kStreams;
    return Result(is_streamed, std::move(attempt));
  }

 private:
  static constexpr std::size_t kProbedFrom = 512u << 10;  // to find out takes up to half a microsecond
  static constexpr std::size_t kOthersFrom = 2u << 20;
  static constexpr unsigned kStreams = 1;                 // the way that streams what lies in memory; the other never does
  ByLength<FewWays<2>, 3, 1u << 20, 2> ways_;
  ByLength<FewWays<2>, 4, 2 * kOthersFrom, 4> others_ways_;
};

}  // namespace pycomm::shm
