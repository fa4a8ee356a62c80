// How the ranks of a group find out how far apart their cores are, and how to store what the others will read.
#include <sched.h>

#include <algorithm>
#include <cstring>

#include "group.h"
#include "stores.h"

namespace pycomm::shm {
namespace {

constexpr std::int64_t kInterruptedNs = 1000;    // no cache line takes so long; somebody was not running
constexpr int kAttempts = 4, kAttemptsInTurns = 24;  // one at least must find both of a pair running
constexpr int kPings = 8;
constexpr int kPatience = 1000;                  // looks at the peer's counter before waiting in earnest
constexpr std::size_t kCallBytes = 1024;         // of traffic, that a call counts for beside its own
constexpr double kMoved = 1.5;                   // a latency that has changed by so much is that of other cores
constexpr std::size_t kTrialBytes = 2048;        // of the exchanges that choose; fits every slot
constexpr double kStreamsWin = 0.9;              // non-temporal stores are chosen where they take less than that share of the time

}  // namespace

void Group::account(std::size_t bytes, const char* verb) {
  if (ranks_ == 1) return;
  const bool is_time = is_due(bytes);
  traffic_bytes_ += kCallBytes + bytes;
  if (is_time && !keeps_slots_) measure_line(verb);
}

bool Group::is_due(std::size_t bytes) const { return ranks_ > 1 && traffic_bytes_ + kCallBytes + bytes >= setup_.measure_every; }

void Group::measure_line(const char* verb) {
  // Cache lines travel in 30 ns between cores that share an L3 and in 250 ns between those that do not, and a virtual
  // machine's cores may be moved from one to the other at any time; so the ranks look how fast lines travel now and then, and
  // choose anew how to store when that has changed. Rank i measures with rank i + n/2, if they run on two cores at the
  // moment; everybody goes by the worst pair.
  traffic_bytes_ = 0;
  const int half = ranks_ / 2, peer = rank_ < half ? rank_ + half : rank_ < 2 * half ? rank_ - half : rank_;
  Ping& mine = ping(rank_);
  mine.home = static_cast<std::uint32_t>(sched_getcpu());
  mine.line_ns = mine.exchange_ns[0] = mine.exchange_ns[1] = 0;
  sync(verb);
  const bool is_elsewhere = ping(peer).home != mine.home;
  if (is_elsewhere) mine.line_ns = time_pings(peer, verb);
  const auto worst = [&](auto figure) {
    sync(verb);
    std::uint32_t ns = 0;
    for (int r = 0; r < ranks_; ++r) ns = std::max(ns, figure(ping(r)));
    return ns;
  };
  const double line_ns = worst([](const Ping& its) { return its.line_ns; });
  if (line_ns > 0) line_ns_ = line_ns;
  const bool have_moved = line_ns > kMoved * chosen_at_ns_ || chosen_at_ns_ > kMoved * line_ns;
  if (line_ns > 0 && (have_moved || ++measured_ >= setup_.choose_every)) {
    chosen_at_ns_ = line_ns;
    measured_ = 0;
    // Plain stores leave what is staged dirty in the writer's caches, from where it reaches a reader at anything from 2 to 20 GB/s;
    // non-temporal ones go to memory. Which is faster no latency tells: 145 ns are those of one mesh (plain, by half) or of a
    // chip's two halves. So both are tried.
    for (const bool streams : {false, true})
      if (is_elsewhere) mine.exchange_ns[streams] = time_exchanges(peer, streams, verb);
    // Where ranks take turns, some of a pair's tries may all have been disturbed, so every pair must be for it.
    const std::uint32_t against = worst([](const Ping& its) -> std::uint32_t { return its.line_ns > 0 && its.exchange_ns[true] >= kStreamsWin * its.exchange_ns[false]; });
    stores_ = against == 0 ? Stores::kStreamed : Stores::kPlain;
    chosen_ = setup_.choices;
  }
  sync(verb);  // nobody measures again before all have read
}

// The time of one `round(count)` of kPings, in ns, the best of a few tries: the slow ones were interrupted.
template <class Round>
std::int64_t Group::time_rounds(Round round) {
  std::int64_t best_ns = INT64_MAX;
  for (int attempts = take_turns() ? kAttemptsInTurns : kAttempts; attempts > 0; --attempts) {
    const std::uint64_t base = ping(rank_).count + 1;  // both of a pair have counted alike
    const std::int64_t start = monotonic_ns();
    for (std::uint64_t i = base; i < base + kPings; ++i) round(i);
    best_ns = std::min(best_ns, monotonic_ns() - start);
  }
  return std::max<std::int64_t>(1, best_ns / kPings);
}

void Group::send_ping(std::uint64_t count) {
  store_release(ping(rank_).count, count);
  waiter_->published();
}

void Group::await_ping(int peer, std::uint64_t count, const char* verb) {
  for (int i = 0; i < kPatience; ++i)
    if (load_acquire(ping(peer).count) >= count) return;
  waiter_->until(ping(peer).count, count, peer, 0, deadline_, verb);
}

std::uint32_t Group::time_pings(int peer, const char* verb) {
  const std::int64_t ns = time_rounds([&](std::uint64_t count) {
    if (rank_ > peer) await_ping(peer, count, verb);
    send_ping(count);
    if (rank_ < peer) await_ping(peer, count, verb);
  }) / 2;
  return ns < kInterruptedNs ? static_cast<std::uint32_t>(ns) : 0;
}

// Of a payload in the slots, which all ranks have left; see [Note: two slots].
std::uint32_t Group::time_exchanges(int peer, bool streams, const char* verb) {
  unsigned char data[kTrialBytes] = {};
  return static_cast<std::uint32_t>(std::min<std::int64_t>(UINT32_MAX, time_rounds([&](std::uint64_t count) {
    unsigned char* const mine = slot(rank_, count) + sizeof(Header);
    copy_by(streams, mine, data, sizeof data);
    send_ping(count);
    await_ping(peer, count, verb);
    std::memcpy(data, slot(peer, count) + sizeof(Header), sizeof data);
  })));
}

}  // namespace pycomm::shm
