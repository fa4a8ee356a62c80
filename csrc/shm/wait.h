// How a rank waits for another one's counter.
//
// Three stages, by what each costs where two cores serve the ranks: spin while the answer is a cache line away (tens of
// nanoseconds), then sched_yield, which hands the core to a rank that shares it (1.4 us), then sleep in a futex (waking a
// sleeper on another core costs 20 us, so only after 50 us of waiting). How long to spin, the caller knows.
//
// [Note: patience] Where other work has the core too, a yield gives the core away for hundreds of microseconds (the kernel
// takes the rest of its slice from who yields), while a sleeper who is woken comes before that work. So a rank that yielded
// in vain halves the time it yields, and one that yielded with success doubles it: four ranks beside a busy process take 50
// to 80 us a small call, where 100 us of yielding each time made it 200. Messages go from rank to rank: where all sleep each waits until
// others have woken, and no short yield ever succeeds (four ranks on two cores of Zen 3 took 100 us to send round a ring, for seconds on
// end, where 8 will do). So who waits for those is now and then as patient as at first.
//
// [Note: waking without a fence] A rank that publishes must know whether to wake somebody: store(flag); load(sleepers).
// On every machine the load may overtake the store, and the fence that forbids it would cost each call 10 to 30 ns. So
// the sleeper pays instead: it stores sleepers, has the kernel run a barrier on every core (membarrier), and only then looks
// at the flag once more. Either the publisher's load comes after that barrier and sees the sleeper, or its store came before
// and the sleeper sees the flag. Where membarrier is missing the publisher fences.
//
// A sleeper wakes every few milliseconds to look whether the awaited rank lives ([Note: dying]), whether somebody
// declared the group broken, whether its deadline has passed, whether a signal (Ctrl-C) wants the thread and, where these
// ranks are a part of a larger group, whether that is broken.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../clock.h"
#include "errors.h"
#include "layout.h"

namespace pycomm::shm {

class Log;

inline std::uint64_t load_acquire(const std::uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }
inline void store_release(std::uint64_t& word, std::uint64_t value) { __atomic_store_n(&word, value, __ATOMIC_RELEASE); }

// Changes the word if it is `from`, and says whether it was.
inline bool pass(std::uint64_t& word, std::uint64_t from, std::uint64_t to) {
  return __atomic_compare_exchange_n(&word, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

// For words that several ranks look at without being told when; what they say is advice.
template <class Word>
Word load_relaxed(const Word& word) { return __atomic_load_n(&word, __ATOMIC_RELAXED); }
template <class Word>
void store_relaxed(Word& word, Word value) { __atomic_store_n(&word, value, __ATOMIC_RELAXED); }

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

inline constexpr std::int64_t kMostYieldNs = 50'000;  // how long to yield before sleeping, times the ranks that share a core
inline constexpr std::int64_t kLeastYieldNs = 500;    // as long as one yield takes
// While another rank copies, this one looks about as often as once for so many bytes (at 10 GB/s).
inline constexpr std::size_t kBytesASpin = 200;
inline constexpr std::int64_t kFirstNapNs = 1'000'000;    // short, since a rank that dies in a call is being waited for already
inline constexpr std::int64_t kLongestNapNs = 8'000'000;  // between two looks around

// What broke a group; kept in Control::failure so that one rank's discovery is everybody's.
enum class FailureKind : std::uint8_t { kNone = 0, kPeerLost = 1, kTimeout = 2, kClosed = 3, kInterrupted = 4 };

struct Failure {
  FailureKind kind;
  int culprit;  // the rank that it is about
  int status;   // that its process ended with, if it is lost
};

// The end of one call's patience. The clock is read when the first wait turns long, so that a short call never reads it.
struct Deadline {
  std::int64_t timeout_ns;
  std::int64_t at_ns = 0;
  void start() {
    if (at_ns == 0) at_ns = monotonic_ns() + timeout_ns;
  }
};

// Whom a wait is for, where that is not one rank: whoever sends a message; or nobody, who may never come. kGivenUp: it is over, as
// another rank has given up what it was for. As in pycomm/transport/_kin.py.
enum Whom : int { kWhoever = -1, kNobodyYet = -2, kGivenUp = -4 };

// Looks elsewhere in a long wait for a rank, or for `Whom`; throws if that is in vain and `has_come`, asked last, says no.
using LookElsewhere = std::function<void(int whom, const std::function<bool()>& has_come)>;

// How long a rank yields before it sleeps; [Note: patience].
class Patience {
 public:
  // Whoever fails so often is as patient as at first; 0: never.
  explicit Patience(std::int64_t most_ns, unsigned most_failures = 0) : most_ns_(most_ns), ns_(most_ns), most_failures_(most_failures) {}
  std::int64_t ns() const { return ns_; }
  // What it waited for came while it yielded; or it did not.
  void succeed() { ns_ = std::min(2 * ns_, most_ns_); }
  void fail() {
    ns_ = std::max(ns_ / 2, kLeastYieldNs);
    if (++failures_ == most_failures_) ns_ = most_ns_, failures_ = 0;
  }

 private:
  const std::int64_t most_ns_;
  std::int64_t ns_;
  const unsigned most_failures_;
  unsigned failures_ = 0;
};

class Waiter {
 public:
  struct Setup {
    std::uint64_t* failure;       // Control::failure: whatever breaks the group ends all that its ranks wait for
    std::uint32_t* gone_on;       // Control::gone_on
    std::uint32_t* asleep;        // how many ranks sleep where this one would
    Sleeper* sleepers;            // one a rank
    int rank, ranks;
    std::vector<int> pidfds;      // one a rank; -1 where there is none (this rank itself)
    std::vector<int> pids;
    int ranks_per_core;
    void (*about_to_block)();     // called before a wait that may take long, as often as that happens
    void (*check_interrupt)();    // throws if the thread has to leave (a Python signal handler raised)
  };

  explicit Waiter(Setup setup);

  // Returns once `word` >= `target`, where rank `peer` (or anyone, if -1) writes it; looks `spins` times before it yields.
  // Throws PeerLost, Timeout or what check_interrupt throws. The cache lines of `payload` come with the word: asked for
  // while waiting, they arrive together with it, and not after.
  void until(const std::uint64_t& word, std::uint64_t target, int peer, int spins, Deadline& deadline, const char* doing,
             const unsigned char* payload = nullptr, int payload_lines = 0) {
    for (int i = 0; i <= spins; ++i) {
      for (int line = 0; line < payload_lines; ++line) __builtin_prefetch(payload + line * kLine);
      if (load_acquire(word) >= target) return;
      pause();
    }
    until_slow(word, target, peer, deadline, doing);
  }

  // To be called after a counter was stored: wakes the ranks that sleep for this one, or of them the one that it is for.
  void published(int to = kAll) {
    if (must_fence_) std::atomic_thread_fence(std::memory_order_seq_cst);
    if (__atomic_load_n(setup_.asleep, __ATOMIC_RELAXED) != 0) wake(to);
  }

  // One look at everything but the counter and signals: throws if the group is broken or a rank is dead, and if rank `peer`
  // has left or time is up and `has_come`, the caller's own look at what it waits for, still says no. When time is up that breaks
  // the group, unless only a message of a user's is late. His message from anyone (-1) is in vain when all others have left; one of a
  // transport that joins several groups may come through another.
  void check(int peer, Deadline& deadline, const char* doing, const std::function<bool()>& has_come, bool is_users = false);
  // The part of `check` without the call's own: throws if the group is broken or a rank of it is dead.
  void look_around(int peer, const char* doing);
  // What Control::failure says, if it says anything.
  std::optional<Failure> failure() const;
  // What all fails with that this rank waits for, if it has abandoned the group itself; else null.
  std::exception_ptr abandoned(const char* doing) const;
  // Throws what it says.
  void throw_if_broken(const char* doing) const;
  // Sleeps until somebody publishes, or for `nap_ns`; `is_ready` and the control line are looked at once more
  // before. tests/model/barrier.pml is the proof.
  template <class Ready>
  void doze(int peer, Ready is_ready, std::int64_t nap_ns = kLongestNapNs) {
    const std::uint32_t bell = lie_down(peer);
    if (load_acquire(*setup_.failure) == 0 && !is_ready()) sleep(bell, nap_ns);
    get_up();
  }

  // To be called before a wait that may take long; see Setup.
  void about_to_block() const { setup_.about_to_block(); }
  // What long waits ask between two naps: runs pending signal handlers, and looks elsewhere; throws what either says.
  void ask_caller(int whom, const std::function<bool()>& has_come) const {
    setup_.check_interrupt();
    look_elsewhere(whom, has_come);
  }
  void look_elsewhere(int whom, const std::function<bool()>& has_come) const {
    const bool may_be_in_vain = load_relaxed(*setup_.gone_on) != 0 && load_acquire(*setup_.failure) == 0;
    if (look_elsewhere_ && (looks_always_ || may_be_in_vain)) look_elsewhere_(whom, has_come);
  }

  Where where(const char* doing) const;
  void name(std::string group, const std::uint64_t* seq) { group_ = std::move(group), seq_ = seq; }
  void is_part_of(Whole whole) { whole_ = std::move(whole); }
  void record_on(Log* log) { log_ = log; }  // tells the board whom the call under way waits for
  // Before there is anything to wait for. `look` throws if the call is in vain for a reason that these ranks do not see; it is asked always, or
  // once one of them has gone on, as it may need Python's lock, which another thread may keep.
  void look_elsewhere_by(LookElsewhere look, bool always) { look_elsewhere_ = std::move(look), looks_always_ = always; }
  // Where all that is waited for takes every rank: `has_begun(r)`, whether rank r takes part in what this one is in.
  void needs_all(std::function<bool(int)> has_begun) { has_begun_ = std::move(has_begun); }
  void declare(FailureKind kind, int culprit);
  void leave();  // tells those who wait for this rank, now or later, that it has closed the group

 private:
  static constexpr int kAll = -1;

  bool is_gone(int r) const;  // it has closed the group
  // The rank that has closed the group so that a wait for `peer` is in vain; -1 if it is not. In a collective, whoever did so before
  // he took part: `peer` may have been told, and not come.
  int whose_leaving_ends(int peer, bool is_users) const;
  void until_slow(const std::uint64_t& word, std::uint64_t target, int peer, Deadline& deadline, const char* doing);
  void wait_long(const std::uint64_t& word, std::uint64_t target, int peer, Deadline& deadline, const char* doing);
  void wake(int to = kAll);
  std::uint32_t lie_down(int peer);
  void sleep(std::uint32_t bell, std::int64_t nap_ns);
  void get_up();

  Setup setup_;
  std::string group_;
  const std::uint64_t* seq_ = nullptr;
  Log* log_ = nullptr;
  std::atomic<unsigned> looks_{0};  // around; a mailbox has two threads that look
  bool must_fence_;
  Patience patience_;
  bool looks_always_ = false;
  LookElsewhere look_elsewhere_;  // this and what follows: behind what a short call reads
  Whole whole_;
  std::function<bool(int)> has_begun_;
};

}  // namespace pycomm::shm
