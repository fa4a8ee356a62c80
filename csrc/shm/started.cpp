// Calls that are started, and ended later; [Note: started calls] in group.h.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "board.h"
#include "group.h"

namespace pycomm::shm {
namespace {

constexpr useconds_t kTurnUs = 20;  // between two looks at whether another thread has left the group,
constexpr int kTurnsAround = 50;    // and so many of those between two looks at everything else

struct Waits {
  explicit Waits(std::atomic<int>& waiters_) : waiters(waiters_) { ++waiters; }
  ~Waits() { --waiters; }
  Waits(const Waits&) = delete;
  Waits& operator=(const Waits&) = delete;
  std::atomic<int>& waiters;
};

}  // namespace

std::shared_ptr<Started> Group::start(Verb verb, std::size_t bytes, std::function<void(Step)> run) {
  if (!claim()) return nullptr;
  const Claim claimed{*this};
  if (started_ != nullptr) look_at_started();
  if (started_ != nullptr || is_due(bytes)) return nullptr;        // to measure is to wait
  if (is_broken() || is_closed_ || is_in_child()) return nullptr;  // who makes it as a whole words that
  const std::uint64_t before = seq_;
  run(Step::kStart);
  if (seq_ == before) return nullptr;
  started_ = std::make_shared<Started>();
  started_->verb = verb;
  started_->bytes = bytes;
  started_->deadline.timeout_ns = deadline_.timeout_ns;
  started_->run = std::move(run);
  return started_;
}

bool Group::test(Started& started) {
  if (!started.has_ended()) {
    if (is_in_child()) throw Misuse("forked", waiter_->where(verb_name(started.verb)));
    if (!claim()) return false;
    const Claim claimed{*this};
    const int peer = started.has_ended() || !look_at_started() ? -1 : not_come();
    if (peer >= 0) waiter_->look_elsewhere(peer, [&] { return is_in_call(peer); });
  }
  if (!started.has_ended()) return false;
  started.throw_if_failed();
  return true;
}

void Group::wait(Started& started, std::int64_t timeout_ns) {
  if (started.has_ended()) return started.throw_if_failed();
  const char* const verb = verb_name(started.verb);
  if (is_in_child()) throw Misuse("forked", waiter_->where(verb));
  const Waits waits(waiters_);
  Deadline patience{timeout_ns > 0 ? timeout_ns : started.deadline.timeout_ns};
  for (int turns = 1; !claim(); ++turns) {  // another thread waits for it too, or makes a call that comes after it
    take_turn(turns);
    patience.start();
    if (started.has_ended()) return started.throw_if_failed();
    if (monotonic_ns() >= patience.at_ns) throw Late("late message", waiter_->where(verb), {-1, 0, patience.timeout_ns});
  }
  const Claim claimed{*this};
  if (!started.has_ended()) await_started(timeout_ns > 0 ? patience : started.deadline);
  started.throw_if_failed();
}

bool Group::drain(std::int64_t timeout_ns) {
  std::shared_ptr<Started> started;
  if (claim()) {  // else another thread is in a call, before which it ended, or waits for it
    const Claim claimed{*this};
    started = started_;
  }
  try {
    if (started != nullptr) wait(*started, timeout_ns);
  } catch (const Late&) {
    return false;
  } catch (const Failed&) {  // its handle tells
  }
  return true;
}

void Group::take_turn(int turns) {
  waiter_->about_to_block();
  usleep(kTurnUs);
  if (turns % kTurnsAround == 0) waiter_->ask_caller(kNobodyYet, [] { return false; });
}

void Group::claim_after_waiters(const char* verb) {
  for (int turns = 1; waiters_.load() > 0; ++turns) {
    if (claim()) return;
    take_turn(turns);
  }
  if (!claim()) throw Misuse("other thread", waiter_->where(verb));
}

int Group::not_come() const {
  for (int i = 1; i < ranks_; ++i) {
    const int r = (rank_ + i) % ranks_;
    if (!is_in_call(r)) return r;
  }
  return -1;
}

bool Group::look_at_started() {
  const int peer = not_come();
  if (peer < 0 || is_broken() || is_closed_) return end_started(), false;
  const std::int64_t now_ns = monotonic_ns();
  if (now_ns - looked_ns_ < kLongestNapNs) return false;
  looked_ns_ = now_ns;
  started_->deadline.start();
  try {  // who asks again and again must hear that it is in vain
    waiter_->check(peer, started_->deadline, verb_name(started_->verb), [this] { return not_come() < 0; });
  } catch (const Failed&) {
    if (not_come() >= 0) return finish_started(std::current_exception()), false;
    end_started();
  }
  return started_ != nullptr;
}

void Group::await_started(Deadline& deadline) {
  const bool is_users = &deadline != &started_->deadline;
  const auto has_come = [this] { return not_come() < 0; };
  const auto wait_for_all = [&] {
    for (int look = 0; look <= (take_turns() ? 0 : kSpinsAlone); ++look) {
      if (has_come()) return;
      pause();
    }
    const char* const verb = verb_name(started_->verb);
    waiter_->about_to_block();
    deadline.start();
    for (const std::int64_t start_ns = monotonic_ns(); monotonic_ns() - start_ns < setup_.ranks_per_core * kMostYieldNs;) {
      sched_yield();
      if (has_come()) return;
    }
    for (std::int64_t nap_ns = kFirstNapNs;; nap_ns = std::min(2 * nap_ns, kLongestNapNs)) {
      const int peer = not_come();
      if (peer < 0) return;
      if (log_ != nullptr) log_->waits_for(peer);
      waiter_->doze(peer, [&] { return is_in_call(peer); }, nap_ns);
      if (has_come()) return;
      waiter_->ask_caller(peer, [&] { return is_in_call(peer); });
      waiter_->check(peer, deadline, verb, has_come, is_users);
    }
  };
  try {
    wait_for_all();
  } catch (const Late&) {
    throw;
  } catch (const Failed&) {
    if (!has_come()) return finish_started(std::current_exception());  // else somebody died after all that was asked of him
  } catch (...) {  // the caller's own, which leaves the call under way, unless this rank has abandoned the group by it
    if (const auto error = waiter_->abandoned(verb_name(started_->verb))) finish_started(error);
    throw;
  }
  if (log_ != nullptr) log_->waits_no_more();
  end_started();
}

void Group::end_started() {
  const auto started = started_;
  deadline_ = started->deadline;
  try {
    if (is_closed_) throw Misuse("closed by this rank", waiter_->where(verb_name(started->verb)));
    started->run(Step::kEnd);
    finish_started(nullptr);
  } catch (const Failed&) {
    finish_started(std::current_exception());
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    try {
      waiter_->throw_if_broken(verb_name(started->verb));
      finish_started(error);
    } catch (const Failed&) {  // by a signal handler's error, which is not this call's
      finish_started(std::current_exception());
    }
    throw;
  }
}

void Group::end_before_another() {
  if (is_in_child()) return;  // it is the parent's
  try {
    end_started();
  } catch (...) {
    unclaim();
    throw;
  }
}

void Group::end_by_close() {
  const bool is_mine = claim();  // else a thread is in a call, and sees to what it waits for
  if (is_mine && started_ != nullptr) look_at_started();
  is_closed_ = true;
  if (!is_mine) return;
  const Claim claimed{*this};
  if (started_ != nullptr) end_started();
}

void Group::finish_started(std::exception_ptr error) {
  if (log_ != nullptr && error != nullptr) log_->fail();
  if (std::exchange(is_recorded_, false)) log_->end();
  const auto started = std::exchange(started_, nullptr);
  started->run = nullptr;
  started->error = std::move(error);
  started->is_done.store(true, std::memory_order_release);
}

}  // namespace pycomm::shm
