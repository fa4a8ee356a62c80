// How a rank waits for several others at once. For the files of collectives.
#pragma once

#include <sched.h>

#include <algorithm>

#include "group.h"

namespace pycomm::shm {

inline constexpr int kSpinsElsewhere = 150;             // about 3 us, the time of two switches between ranks on another core
inline constexpr int kCrowdedRounds = 4;                // so many on a crowded core before a rank steps aside
inline constexpr std::size_t kLinesAhead = 4;           // of a payload, to ask for while waiting; of more the reader takes back what is being written

template <class Word>
void Group::await_ranks(Word word, std::uint64_t target, const char* verb, std::size_t payload_bytes, int from, int to, int spins) {
  lines_ = payload_bytes <= sizeof(Header::payload) ? 0 : static_cast<int>(std::min((payload_bytes + kLine - 1) / kLine, kLinesAhead));
  const auto after = [&](int i) { return rank_ + i < ranks_ ? rank_ + i : rank_ + i - ranks_; };
  const auto await = [&](int r, int looks) {
    if (r >= from && r < to) waiter_->until(word(r), target, r, looks, deadline_, verb, line(r) + sizeof(Header), lines_);
  };
  if (!take_turns()) {
    for (int i = 1; i < ranks_; ++i) await(after(i), spins);
    return;
  }
  // Ranks that share a core take turns. One that this rank keeps from running gets the core at once; only when all of
  // those have come is it worth a spin for the others, which are running elsewhere: then every rank runs once a round.
  Ping& own = ping(rank_);
  const auto cpu = static_cast<std::uint32_t>(sched_getcpu());
  if (load_relaxed(own.cpu) != cpu) store_relaxed(own.cpu, cpu);
  int company = 1;
  for (int i = 1; i < ranks_; ++i) {
    if (load_relaxed(ping(after(i)).cpu) != cpu) continue;
    ++company;
    await(after(i), 0);
  }
  if (2 * company > ranks_ + 1 && ++crowded_rounds_ % kCrowdedRounds == 0) step_aside(cpu);
  for (int i = 1; i < ranks_; ++i) await(after(i), kSpinsElsewhere);  // all of them: a rank may have moved meanwhile
}

}  // namespace pycomm::shm
