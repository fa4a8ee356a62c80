#include "wait.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "board.h"
#include "process.h"

namespace pycomm::shm {
namespace {

bool has_membarrier() {
  static const bool has = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0;
  return has;
}

}  // namespace

Waiter::Waiter(Setup setup)
    : setup_(std::move(setup)), must_fence_(!has_membarrier()), patience_(setup_.ranks_per_core * kMostYieldNs) {}

void Waiter::until_slow(const std::uint64_t& word, std::uint64_t target, int peer, Deadline& deadline,
                        const char* doing) {
  if (log_ == nullptr) return wait_long(word, target, peer, deadline, doing);
  log_->waits_for(peer);
  try {
    wait_long(word, target, peer, deadline, doing);
  } catch (...) {
    log_->fail();
    throw;
  }
  log_->waits_no_more();
}

void Waiter::wait_long(const std::uint64_t& word, std::uint64_t target, int peer, Deadline& deadline,
                       const char* doing) {
  const auto is_ready = [&] { return load_acquire(word) >= target; };
  setup_.about_to_block();
  const std::int64_t start = monotonic_ns();
  deadline.start();
  do {
    sched_yield();
    if (is_ready()) {
      patience_.succeed();
      return;
    }
  } while (monotonic_ns() - start < patience_.ns());
  patience_.fail();
  for (std::int64_t nap_ns = kFirstNapNs;; nap_ns = std::min(2 * nap_ns, kLongestNapNs)) {
    doze(peer, is_ready, nap_ns);
    if (is_ready()) return;
    try {
      ask_caller(peer, is_ready);
    } catch (...) {  // this rank leaves in the middle of a call, and the others must not wait for it
      declare(FailureKind::kInterrupted, setup_.rank);
      throw;
    }
    try {
      check(peer, deadline, doing, is_ready);
    } catch (...) {
      if (is_ready()) return;  // it died, or the clock ran out, after all that was asked of it
      throw;
    }
  }
}

void Waiter::check(int peer, Deadline& deadline, const char* doing, const std::function<bool()>& has_come, bool is_users) {
  look_around(peer, doing);
  const int gone = whose_leaving_ends(peer, is_users);
  const bool is_late = monotonic_ns() >= deadline.at_ns;
  // Asked last: a peer publishes all that is its part before it leaves, and then its leaving breaks nothing.
  if ((gone < 0 && !is_late) || has_come()) return;
  if (gone >= 0) {
    declare(FailureKind::kClosed, gone);
    throw_if_broken(doing);
  }
  const std::vector<std::int64_t> whom{peer, peer < 0 ? 0 : setup_.pids[peer], deadline.timeout_ns};
  if (is_users) throw Late("late message", where(doing), whom);
  declare(FailureKind::kTimeout, setup_.rank);
  throw Timeout("late", where(doing), whom);
}

bool Waiter::is_gone(int r) const { return __atomic_load_n(&setup_.sleepers[r].is_gone, __ATOMIC_ACQUIRE) != 0; }

int Waiter::whose_leaving_ends(int peer, bool is_users) const {
  if (peer >= 0 && is_gone(peer)) return peer;
  if (has_begun_)
    for (int r = 0; r < setup_.ranks; ++r)
      if (is_gone(r) && !has_begun_(r)) return r;
  if (peer >= 0 || !is_users) return -1;
  int last = -1;  // anyone may be waited for while there is one
  for (int r = 0; r < setup_.ranks; ++r) {
    if (r == setup_.rank) continue;
    if (!is_gone(r)) return -1;
    last = r;
  }
  return last;
}

void Waiter::look_around(int peer, const char* doing) {
  throw_if_broken(doing);
  // All are looked at cheaply; closely, see [Note: dying], whom this rank waits for, or if that is nobody, one in turn.
  const int closely = peer >= 0 ? peer : static_cast<int>(looks_.fetch_add(1, std::memory_order_relaxed) % static_cast<unsigned>(setup_.ranks));
  for (int r = 0; r < setup_.ranks; ++r) {
    // A rank that closed the group before it ended is missed only by those who wait for it; it may do both between two of these lines.
    if (is_gone(r)) continue;
    if (r == closely ? !is_dead(setup_.pidfds[r], setup_.pids[r]) : !has_ended(setup_.pidfds[r])) continue;
    if (is_gone(r)) continue;
    declare(FailureKind::kPeerLost, r);
    throw_if_broken(doing);
  }
}

void Waiter::declare(FailureKind kind, int culprit) {
  std::uint64_t none = 0;
  // How it ended is looked up once, here: soon its parent may have collected it, and older kernels tell no more then.
  const int status = kind == FailureKind::kPeerLost ? exit_status(setup_.pidfds[culprit], setup_.pids[culprit]) : 0;
  const std::uint64_t value = static_cast<std::uint64_t>(kind) | static_cast<std::uint64_t>(culprit + 1) << 8 |
                              static_cast<std::uint64_t>(static_cast<std::uint32_t>(status)) << 32;
  // The first discovery stands; later ones are its consequences.
  if (__atomic_compare_exchange_n(setup_.failure, &none, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) wake();
}

void Waiter::leave() {
  __atomic_store_n(&setup_.sleepers[setup_.rank].is_gone, 1, __ATOMIC_SEQ_CST);
  wake();
}

std::optional<Failure> Waiter::failure() const {
  const std::uint64_t word = load_acquire(*setup_.failure);
  if (word == 0) return std::nullopt;
  return Failure{static_cast<FailureKind>(word & 0xff), static_cast<int>(word >> 8 & 0xffffff) - 1,
                 static_cast<int>(static_cast<std::uint32_t>(word >> 32))};
}

void Waiter::throw_if_broken(const char* doing) const {
  const auto found = failure();
  if (!found) return;
  const int culprit = found->culprit, pid = setup_.pids[culprit];
  switch (found->kind) {
    case FailureKind::kPeerLost: throw PeerLost("lost", where(doing), culprit, pid, found->status);
    case FailureKind::kClosed: throw PeerLost("closed", where(doing), culprit, pid, 0);
    case FailureKind::kInterrupted: {
      PeerLost interrupted("interrupted", where(doing), culprit, pid, 0);
      if (culprit != setup_.rank && look_elsewhere_) interrupted.why = [look = look_elsewhere_] { look(kGivenUp, [] { return false; }); };
      throw interrupted;
    }
    default: throw Timeout("timeout", where(doing), {culprit, pid, 0});
  }
}

std::exception_ptr Waiter::abandoned(const char* doing) const {
  const auto found = failure();
  if (!found || found->kind != FailureKind::kInterrupted || found->culprit != setup_.rank) return nullptr;
  try {
    throw_if_broken(doing);
  } catch (const Failed&) {
    return std::current_exception();
  }
  return nullptr;
}

Where Waiter::where(const char* doing) const {
  const std::uint64_t seq = seq_ == nullptr ? 0 : load_relaxed(*seq_);
  if (whole_.ranks.empty()) return {doing, seq, group_, setup_.rank, setup_.ranks};
  return {doing, seq, group_, whole_.ranks[static_cast<std::size_t>(setup_.rank)], whole_.size, whole_.global_ranks, whole_.ranks};
}

void Waiter::wake(int to) {
  const std::uint32_t me = static_cast<std::uint32_t>(setup_.rank) + 1;
  const bool is_broken = load_acquire(*setup_.failure) != 0;
  for (int r = 0; r < setup_.ranks; ++r) {
    if (to != kAll && r != to) continue;
    Sleeper& other = setup_.sleepers[r];
    const std::uint32_t awaits = __atomic_load_n(&other.awaits, __ATOMIC_ACQUIRE);
    if (awaits == 0 || !(awaits == me || awaits == kAnyone || is_broken)) continue;
    __atomic_fetch_add(&other.bell, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &other.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

std::uint32_t Waiter::lie_down(int peer) {
  Sleeper& self = setup_.sleepers[setup_.rank];
  const std::uint32_t bell = __atomic_load_n(&self.bell, __ATOMIC_SEQ_CST);
  __atomic_store_n(&self.awaits, peer < 0 ? kAnyone : static_cast<std::uint32_t>(peer) + 1, __ATOMIC_SEQ_CST);
  __atomic_fetch_add(setup_.asleep, 1, __ATOMIC_SEQ_CST);
  if (!must_fence_) syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0);
  return bell;
}

void Waiter::sleep(std::uint32_t bell, std::int64_t nap_ns) {
  const struct timespec nap{0, nap_ns};
  syscall(SYS_futex, &setup_.sleepers[setup_.rank].bell, FUTEX_WAIT, bell, &nap, nullptr, 0);
}

void Waiter::get_up() {
  __atomic_fetch_sub(setup_.asleep, 1, __ATOMIC_SEQ_CST);
  __atomic_store_n(&setup_.sleepers[setup_.rank].awaits, 0, __ATOMIC_SEQ_CST);
}

}  // namespace pycomm::shm
