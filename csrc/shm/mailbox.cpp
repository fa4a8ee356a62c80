#include "mailbox.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <system_error>
#include <utility>

#include "board.h"
#include "errors.h"
#include "process.h"

namespace pycomm::shm {
namespace {

constexpr int kSpins = 200, kSpinsCrowded = 1;  // before a rank yields; where ranks share a core, the latter
constexpr unsigned kMostFailures = 16;           // of yields
constexpr int kLooksASpin = 4;                   // between which other threads may get in
// How long nobody may call before the helper moves what there is. To look costs the rank 40 us, so while it is busy that is done ever more rarely.
constexpr std::chrono::microseconds kHelpAfter{500}, kHelpAfterBusy{4000};

constexpr std::chrono::milliseconds kOnlook{1};  // between two looks whether another thread still drives the messages on,
constexpr int kOnlooksAround = 8;                // and so many of those between two looks around

// What the board says of a wait for a message goes with the wait.
struct OnBoard {
  explicit OnBoard(Log* log_) : log(log_) {}
  ~OnBoard() {
    if (log != nullptr) log->awaits_no_mail();
  }
  Log* log;
};

}  // namespace

Mailbox::Mailbox(unsigned char* area, const AreaLayout& at, Waiter::Setup setup, std::string group, std::optional<bool> offers, Populate populate)
    : area_(area), at_(at), rank_(setup.rank), ranks_(setup.ranks), spins_(setup.ranks_per_core > 1 ? kSpinsCrowded : kSpins), forks_at_start_(forks()),
      // Who sends what this rank waits for may itself wait for ranks of other cores; those of a collective take turns.
      patience_(setup.ranks_per_core * setup.ranks_per_core * kMostYieldNs, kMostFailures),
      pids_(setup.pids), pidfds_(setup.pidfds), waiter_(std::move(setup)), offers_(offers), populate_(std::move(populate)) {
  waiter_.name(std::move(group), &messages_);
  auto* const counters = reinterpret_cast<LineCounter*>(area + at.mail_counters);
  const auto counter = [&](int from, int to, int which) -> std::uint64_t& { return counters[3 * (from * ranks_ + to) + which].value; };
  for (int r = 0; r < ranks_; ++r) {
    outbound_.push_back({r, ChannelWriter(ring(rank_, r), at_.channel_bytes, counter(rank_, r, 0), counter(rank_, r, 1)), Offer(counter(rank_, r, 2)), {}});
    inbound_.push_back({ChannelReader(ring(r, rank_), at_.channel_bytes, counter(r, rank_, 1), counter(r, rank_, 0)), Offer(counter(r, rank_, 2)),
                        {}, {}, {}, {}, {}, {}, {}, {}, {}, {}});
    pieces_.push_back(pieces_with(r));
  }
}

Mailbox::~Mailbox() { close(); }

void Mailbox::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closed_ = true;
    if (!broken_) fail_all(std::make_exception_ptr(Misuse("closed by this rank", waiter_.where("send/recv"))));
    changed_.notify_all();
    called_.notify_all();
  }
  if (helper_.joinable()) helper_.join();
  waiter_.leave();
}

unsigned char* Mailbox::ring(int from, int to) const {
  return area_ + at_.channels + (static_cast<std::size_t>(from) * static_cast<std::size_t>(ranks_) + static_cast<std::size_t>(to)) * at_.channel_bytes;
}

Pieces Mailbox::pieces_with(int other) const {
  const auto n = static_cast<std::size_t>(ranks_), low = static_cast<std::size_t>(std::min(rank_, other)), high = static_cast<std::size_t>(std::max(rank_, other));
  const std::size_t each = other == rank_ ? 0 : at_.pieces_each;
  return Pieces(area_ + at_.pieces + (low * n + high) * 2 * at_.pieces_each * kPieceBytes, rank_ < other ? 0 : each, each);
}

void Mailbox::prepare_to_send(const Message& message) {
  const auto populate = [this](const unsigned char* start, std::size_t bytes) { populate_(static_cast<std::size_t>(start - area_), bytes); };
  Outbound& outbound = outbound_[message.peer];
  if (!outbound.is_populated) populate(ring(rank_, message.peer), at_.channel_bytes);
  outbound.is_populated = true;
  Pieces& pieces = pieces_[message.peer];
  if (!Pieces::may_hold(message.bytes) || pieces.has_begun()) return;
  if (pieces.begins_with_bytes() > 0) populate(pieces.begins_with(), pieces.begins_with_bytes());
  pieces.begin();
}

// -- starting and waiting ---------------------------------------------------------------------------------------------------

std::shared_ptr<Message> Mailbox::send(const void* data, std::size_t bytes, int peer, std::int64_t tag) {
  // The bytes are only read; one Message type serves both directions.
  auto* const start_of = static_cast<unsigned char*>(const_cast<void*>(data));
  return start(std::make_shared<Message>(true, peer, tag, start_of, bytes));
}

std::shared_ptr<Message> Mailbox::receive(void* data, std::size_t bytes, int peer, std::int64_t tag) {
  return start(std::make_shared<Message>(false, peer, tag, static_cast<unsigned char*>(data), bytes));
}

std::unique_lock<std::mutex> Mailbox::enter() {
  if (forks() != forks_at_start_) throw Misuse("forked", waiter_.where("send/recv"));
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock) {
    waiter_.about_to_block();
    lock.lock();
  }
  ++calls_;
  return lock;
}

std::shared_ptr<Message> Mailbox::start(std::shared_ptr<Message> message) {
  const auto lock = enter();
  store_relaxed(messages_, messages_ + 1);  // where() reads it without the lock
  if (broken_) std::rethrow_exception(broken_);
  waiter_.throw_if_broken(message->is_send ? "send" : "recv");
  if (message->is_send) {
    prepare_to_send(*message);
    outbound_[message->peer].messages.push_back(message);
    ++sends_;
  } else {
    receives_.push_back(message);
    if (take_aside(*message)) return message;
  }
  // Who posts a long receive often sends as much next, and the other rank would wait for that while this one copies.
  if (message->is_send || message->bytes < kPieceBytes) progress();
  if (message->is_done) return message;
  try {
    if (!helper_.joinable()) helper_ = std::thread([this] { help(); });
  } catch (const std::system_error&) {  // no thread to be had: then messages move when somebody waits
  }
  if (helper_rests_) called_.notify_all();
  return message;
}

bool Mailbox::test(const std::shared_ptr<Message>& message) {
  auto lock = enter();
  // Who asks again and again keeps the helper away, so now and then it has to be this thread that sees who is lost.
  if (!message->is_done && !progress() && monotonic_ns() - looked_ns_ >= kLongestNapNs) {
    looked_ns_ = monotonic_ns();
    Deadline never{0, std::numeric_limits<std::int64_t>::max()};
    try {
      look_around(lock, *message, never);
    } catch (const Failed&) {
      lock.lock();
      break_off(std::current_exception());
    }
  }
  if (message->is_done) throw_if_failed(*message);
  return message->is_done;
}

void Mailbox::wait(const std::shared_ptr<Message>& message, std::int64_t timeout_ns) {
  auto lock = enter();
  Deadline deadline{timeout_ns};
  std::int64_t idle_since = 0;  // when the spinning ended
  bool has_slept = false;       // since a byte moved
  bool drives = false;          // this thread does, the messages of all
  const OnBoard on_board(log_);
  const auto leave = [&] {  // to who else waits
    if (!lock.owns_lock()) lock.lock();
    if (std::exchange(drives, false)) is_driven_ = false;
    if (onlookers_ > 0) changed_.notify_all();
  };
  try {
    for (int idle = 0; !message->is_done; ++idle) {
      if (!drives) {
        look_on(lock, *message, deadline);
        if (message->is_done) break;
        drives = is_driven_ = true;
      }
      for (int look = 0; look < kLooksASpin && !is_anything_new(); ++look) pause();
      const bool moved = progress();
      if (moved && idle > spins_ && !has_slept) patience_.succeed();
      if (message->is_done) break;
      lock.unlock();
      if (moved) {
        idle = -1;
        has_slept = false;
      } else if (idle < spins_) {
        pause();
      } else if (idle == spins_ || monotonic_ns() - idle_since < patience_.ns()) {
        if (idle == spins_) {
          waiter_.about_to_block();
          idle_since = monotonic_ns();
          deadline.start();
        }
        sched_yield();
      } else {
        if (!has_slept) patience_.fail();
        has_slept = true;
        if (log_ != nullptr) log_->awaits_mail(message->peer);
        waiter_.doze(-1, [this] {
          const std::lock_guard<std::mutex> inner(mutex_);
          return is_anything_new();
        });
        leave();  // a signal handler may wait for a message itself
        look_around(lock, *message, deadline);
        continue;
      }
      lock.lock();
    }
  } catch (const Late&) {
    leave();
    throw;
  } catch (const Failed&) {
    leave();
    break_off(std::current_exception());
  } catch (...) {  // the caller's own (Ctrl-C): the message stays under way, unless this rank has abandoned the group by it
    leave();
    if (const auto error = waiter_.abandoned("send/recv")) break_off(error);
    throw;
  }
  leave();
  throw_if_failed(*message);
}

void Mailbox::look_on(std::unique_lock<std::mutex>& lock, const Message& message, Deadline& deadline) {
  for (int looks = 1; is_driven_ && !message.is_done; ++looks) {
    waiter_.about_to_block();
    deadline.start();
    ++onlookers_;
    changed_.wait_for(lock, kOnlook);
    --onlookers_;
    if (looks % kOnlooksAround == 0) look_around(lock, message, deadline);
  }
}

void Mailbox::look_around(std::unique_lock<std::mutex>& lock, const Message& message, Deadline& deadline) {
  const int peer = message.peer;  // another thread's progress may find out who the sender is
  const bool is_users = message.tag <= kLastTag;
  lock.unlock();
  const auto has_come = [&] {
    const std::lock_guard<std::mutex> inner(mutex_);
    return message.is_done || is_anything_new();
  };
  waiter_.ask_caller(peer >= 0 ? peer : is_users ? kWhoever : kNobodyYet, has_come);
  waiter_.check(peer, deadline, message.is_send ? "send" : "recv", has_come, is_users);
  lock.lock();
}

bool Mailbox::give_up(const std::shared_ptr<Message>& message) {
  const auto lock = enter();
  if (message->is_done) return true;
  if (message->is_send) {
    if (message->is_framed) return false;
    auto& messages = outbound_[message->peer].messages;
    messages.erase(std::find(messages.begin(), messages.end(), message));
    --sends_;
  } else {
    for (Inbound& inbound : inbound_) {
      if (inbound.target != message) continue;
      inbound.aside.assign(message->data, message->data + message->bytes);
      inbound.target = nullptr;
    }
    forget_receive(*message);
  }
  message->is_done = true;
  return true;
}

void Mailbox::help() {
  std::unique_lock<std::mutex> lock(mutex_);
  auto after = kHelpAfter;
  while (!is_closed_) {
    const std::uint64_t calls = calls_;
    called_.wait_for(lock, after, [this] { return is_closed_; });
    const bool is_busy = calls != calls_;
    after = is_busy ? std::min(2 * after, kHelpAfterBusy) : kHelpAfter;
    if (is_closed_ || is_driven_ || broken_ || is_busy) continue;  // this rank does it itself
    if (!has_work()) {
      helper_rests_ = true;  // to be called from there costs the caller some ten microseconds
      called_.wait(lock, [this] { return is_closed_ || has_work(); });
      helper_rests_ = false;
      continue;
    }
    while (progress()) {}
    lock.unlock();
    waiter_.doze(-1, [this] {
      const std::lock_guard<std::mutex> inner(mutex_);
      return is_driven_ || is_closed_ || !has_work() || is_anything_new();
    });
    std::exception_ptr error;
    try {
      waiter_.look_around(-1, "send/recv");
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error) break_off(error);
  }
}

// -- failing ----------------------------------------------------------------------------------------------------------------

// The bytes are no longer the receiver's to read.
void Mailbox::retract(Outbound& outbound) {
  if (outbound.messages.empty() || !outbound.messages.front()->is_offered || outbound.offer.withdraw(outbound.offers)) return;
  while (outbound.offer.state() == Offer::kTaken && !has_ended(pidfds_[outbound.to])) sched_yield();
}

void Mailbox::break_off(const std::exception_ptr& error) {
  while (progress()) {}
  fail_all(error);
}

void Mailbox::fail_all(const std::exception_ptr& error) {
  broken_ = error;
  const auto fail = [&](const std::shared_ptr<Message>& message) {
    message->error = error;
    message->is_done = true;
  };
  for (Outbound& outbound : outbound_) {
    retract(outbound);
    std::for_each(outbound.messages.begin(), outbound.messages.end(), fail);
    outbound.messages.clear();
  }
  std::for_each(receives_.begin(), receives_.end(), fail);
  receives_.clear();
  sends_ = 0;
  for (Inbound& inbound : inbound_) {
    inbound.target = nullptr;
    inbound.is_dropped = true;
  }
}

void Mailbox::throw_if_failed(const Message& message) {
  if (message.error) std::rethrow_exception(message.error);
}

}  // namespace pycomm::shm
