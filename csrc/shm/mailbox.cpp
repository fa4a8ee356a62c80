#include "mailbox.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>

#include "board.h"
#include "errors.h"

namespace pycomm::shm {
namespace {

constexpr std::size_t kAlign = 16;              // frames start on multiples of this, so that none wraps around
constexpr std::size_t kSegment = 64 * 1024;     // so much is written before the receiver is told
constexpr int kSpins = 200;
constexpr std::int64_t kYieldNs = 50'000;
constexpr auto kHelpAfter = std::chrono::microseconds(500);  // how long nobody may call before the helper moves what there is

// What the board says of a wait for a message goes with the wait.
struct OnBoard {
  explicit OnBoard(Log* log_) : log(log_) {}
  ~OnBoard() {
    if (log != nullptr) log->awaits_no_mail();
  }
  Log* log;
};

}  // namespace

Mailbox::Mailbox(unsigned char* area, const AreaLayout& at, Waiter::Setup setup, std::string group, Populate populate)
    : area_(area), at_(at), rank_(setup.rank), ranks_(setup.ranks), counters_(reinterpret_cast<LineCounter*>(area + at.mail_counters)),
      waiter_(std::move(setup)), populate_(std::move(populate)), inbound_(ranks_), has_channel_(ranks_, false) {
  waiter_.name(std::move(group), &messages_);
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

// -- the channel ---------------------------------------------------------------------------------------------------------------

unsigned char* Mailbox::channel(int from, int to) const {
  return area_ + at_.channels + (static_cast<std::size_t>(from) * static_cast<std::size_t>(ranks_) + static_cast<std::size_t>(to)) * at_.channel_bytes;
}

void Mailbox::write_channel(int to, const void* bytes, std::size_t count) {
  const std::size_t at = written(rank_, to) % at_.channel_bytes, first = std::min(count, at_.channel_bytes - at);
  std::memcpy(channel(rank_, to) + at, bytes, first);
  std::memcpy(channel(rank_, to), static_cast<const unsigned char*>(bytes) + first, count - first);
}

void Mailbox::read_channel(int from, void* bytes, std::size_t count) const {
  const std::size_t at = read(from, rank_) % at_.channel_bytes, first = std::min(count, at_.channel_bytes - at);
  std::memcpy(bytes, channel(from, rank_) + at, first);
  std::memcpy(static_cast<unsigned char*>(bytes) + first, channel(from, rank_), count - first);
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

std::shared_ptr<Message> Mailbox::start(std::shared_ptr<Message> message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  store_relaxed(messages_, messages_ + 1);  // where() reads it without the lock
  ++calls_;
  if (broken_) std::rethrow_exception(broken_);
  if (message->is_send && !has_channel_[message->peer]) {
    populate_(static_cast<std::size_t>(channel(rank_, message->peer) - area_), at_.channel_bytes);
    has_channel_[message->peer] = true;
  }
  (message->is_send ? sends_ : receives_).push_back(message);
  if (!message->is_send && take_aside(*message)) return message;
  progress();
  if (message->is_done) return message;
  if (!helper_.joinable()) helper_ = std::thread([this] { help(); });
  if (helper_rests_) called_.notify_all();
  return message;
}

bool Mailbox::test(const std::shared_ptr<Message>& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++calls_;
  if (!message->is_done) progress();
  if (message->is_done) throw_if_failed(*message);
  return message->is_done;
}

void Mailbox::wait(const std::shared_ptr<Message>& message, std::int64_t timeout_ns) {
  const char* doing = message->is_send ? "send" : "recv";
  std::unique_lock<std::mutex> lock(mutex_);
  ++calls_;
  ++onlookers_;
  while (is_driven_ && !message->is_done) changed_.wait_for(lock, std::chrono::milliseconds(1));
  --onlookers_;
  if (message->is_done) return throw_if_failed(*message);
  is_driven_ = true;
  Deadline deadline{timeout_ns, monotonic_ns() + timeout_ns};
  std::int64_t idle_since = monotonic_ns();
  const OnBoard on_board(log_);
  try {
    for (int idle = 0; !message->is_done; ++idle) {
      if (progress()) {
        idle = 0;
        idle_since = monotonic_ns();
        continue;
      }
      const int peer = message->peer;  // another thread's progress may find out who the sender is
      lock.unlock();
      if (idle < kSpins) {
        pause();
      } else if (monotonic_ns() - idle_since < kYieldNs) {
        sched_yield();
      } else {
        const auto has_come = [this] {
          const std::lock_guard<std::mutex> inner(mutex_);
          return is_anything_new();
        };
        if (log_ != nullptr) log_->awaits_mail(peer);
        waiter_.doze(-1, has_come);
        waiter_.check_interrupt();
        waiter_.check(peer, deadline, doing, has_come);
      }
      lock.lock();
    }
  } catch (const PeerLost&) {
    lock.lock();
    fail_all(std::current_exception());
    is_driven_ = false;
    changed_.notify_all();
    throw;
  } catch (const Timeout&) {
    lock.lock();
    cancel(message);
    is_driven_ = false;
    changed_.notify_all();
    throw;
  } catch (...) {  // Ctrl-C: the message stays under way
    lock.lock();
    is_driven_ = false;
    changed_.notify_all();
    throw;
  }
  is_driven_ = false;
  if (onlookers_ > 0) changed_.notify_all();
  throw_if_failed(*message);
}

void Mailbox::help() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_closed_) {
    const std::uint64_t calls = calls_;
    called_.wait_for(lock, kHelpAfter, [this] { return is_closed_; });
    if (is_closed_ || is_driven_ || broken_ || calls != calls_) continue;  // this rank does it itself
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
    if (error) fail_all(error);
  }
}

// -- moving -----------------------------------------------------------------------------------------------------------------

bool Mailbox::progress() {
  bool moved = false;
  std::vector<bool> is_full(static_cast<std::size_t>(ranks_), false);
  for (auto it = sends_.begin(); it != sends_.end();) {
    Message& message = **it;
    if (!is_full[message.peer]) moved |= push(message);
    if (message.is_done) {
      it = sends_.erase(it);
    } else {
      is_full[message.peer] = true;  // the next message to this rank comes after
      ++it;
    }
  }
  for (int from = 0; from < ranks_; ++from)
    if (is_awaited(from) || inbound_[from].is_open) moved |= pull(from);
  return moved;
}

bool Mailbox::push(Message& message) {
  std::uint64_t& end = written(rank_, message.peer);
  const auto space = [&] { return at_.channel_bytes - (end - load_acquire(read(rank_, message.peer))); };
  bool moved = false;
  if (!message.is_framed) {
    if (space() < sizeof(Frame)) return false;
    const Frame frame{message.bytes, message.tag};
    write_channel(message.peer, &frame, sizeof frame);
    store_release(end, end + sizeof frame);
    message.is_framed = moved = true;
  }
  while (message.moved < message.bytes) {
    const std::size_t count = std::min({message.bytes - message.moved, kSegment, static_cast<std::size_t>(space())});
    if (count == 0) break;
    write_channel(message.peer, message.data + message.moved, count);
    message.moved += count;
    const bool is_last = message.moved == message.bytes;
    store_release(end, is_last ? round_up(end + count, kAlign) : end + count);
    waiter_.published();
    moved = true;
  }
  if (moved) waiter_.published();
  message.is_done = message.moved == message.bytes;
  return moved;
}

bool Mailbox::is_awaited(int from) const {
  return std::any_of(receives_.begin(), receives_.end(), [from](const auto& m) { return m->peer < 0 || m->peer == from; });
}

bool Mailbox::pull(int from) {
  Inbound& inbound = inbound_[from];
  std::uint64_t& start = read(from, rank_);
  const auto ready = [&] { return load_acquire(written(from, rank_)) - start; };
  bool moved = false;
  for (;;) {
    if (!inbound.is_open) {
      if (ready() < sizeof(Frame) || !is_awaited(from)) return moved;
      open_inbound(from);
      moved = true;
    }
    while (inbound.moved < inbound.frame.bytes) {
      const std::size_t count = std::min({inbound.frame.bytes - inbound.moved, kSegment, static_cast<std::size_t>(ready())});
      if (count == 0) return moved;
      if (inbound.target) {
        read_channel(from, inbound.target->data + inbound.moved, count);
      } else if (!inbound.is_dropped) {
        read_channel(from, inbound.aside.data() + inbound.moved, count);
      }
      inbound.moved += count;
      const bool is_last = inbound.moved == inbound.frame.bytes;
      store_release(start, is_last ? round_up(start + count, kAlign) : start + count);
      waiter_.published();
      moved = true;
    }
    if (inbound.target) {
      inbound.target->is_done = true;
      receives_.remove(inbound.target);
    } else if (!inbound.is_dropped) {
      inbound.set_aside.push_back({inbound.frame, std::move(inbound.aside)});
      // Somebody may have asked for it while it came.
      const auto asked = receives_;
      for (const auto& message : asked)
        if (take_aside(*message)) break;
    }
    inbound.is_open = false;
    inbound.target = nullptr;
  }
}

void Mailbox::open_inbound(int from) {
  Inbound& inbound = inbound_[from];
  std::uint64_t& start = read(from, rank_);
  read_channel(from, &inbound.frame, sizeof(Frame));
  store_release(start, start + sizeof(Frame));
  inbound.is_open = true;
  inbound.moved = 0;
  inbound.is_dropped = false;
  for (const auto& message : receives_) {
    if ((message->peer >= 0 && message->peer != from) || message->tag != inbound.frame.tag) continue;
    if (std::any_of(inbound_.begin(), inbound_.end(), [&](const Inbound& other) { return other.target == message; })) continue;
    inbound.target = message;
    break;
  }
  if (!inbound.target) {
    try {
      inbound.aside.assign(inbound.frame.bytes, 0);
    } catch (const std::exception&) {  // no memory, or no length at all: nothing that comes after it can be found
      const auto bytes = static_cast<std::int64_t>(inbound.frame.bytes);
      fail_all(std::make_exception_ptr(Failed("no memory", waiter_.where("recv"), {from, inbound.frame.tag, bytes})));
    }
    return;
  }
  const auto target = inbound.target;
  accept(*target, inbound.frame, from);
  if (!target->is_done) return;
  inbound.is_dropped = true;  // lengths differ: the bytes go nowhere
  inbound.target = nullptr;
  receives_.remove(target);
}

void Mailbox::accept(Message& message, const Frame& frame, int from) {
  message.peer = from;
  if (frame.bytes == message.bytes) return;
  message.is_done = true;
  message.error = std::make_exception_ptr(Mismatch("size", waiter_.where("recv"), {from, frame.tag, static_cast<std::int64_t>(message.bytes),
                                                                                   static_cast<std::int64_t>(frame.bytes)}));
}

bool Mailbox::take_aside(Message& message) {
  for (int from = 0; from < ranks_; ++from) {
    if (message.peer >= 0 && message.peer != from) continue;
    auto& waiting = inbound_[from].set_aside;
    const auto it = std::find_if(waiting.begin(), waiting.end(), [&](const Aside& aside) { return aside.frame.tag == message.tag; });
    if (it == waiting.end()) continue;
    accept(message, it->frame, from);
    if (!message.is_done) std::copy(it->data.begin(), it->data.end(), message.data);
    message.is_done = true;
    waiting.erase(it);
    receives_.remove_if([&](const auto& other) { return other.get() == &message; });
    return true;
  }
  return false;
}

// -- failing ----------------------------------------------------------------------------------------------------------------

void Mailbox::cancel(const std::shared_ptr<Message>& message) {
  for (Inbound& inbound : inbound_) {
    if (inbound.target != message) continue;
    inbound.target = nullptr;
    inbound.is_dropped = true;
  }
  sends_.remove(message);
  receives_.remove(message);
  // Half a message cannot be called back: the receiver would take the next one for its rest.
  if (message->is_send && message->is_framed) fail_all(std::current_exception());
}

void Mailbox::fail_all(const std::exception_ptr& error) {
  broken_ = error;
  for (auto* list : {&sends_, &receives_}) {
    for (const auto& message : *list) {
      message->error = error;
      message->is_done = true;
    }
    list->clear();
  }
  for (Inbound& inbound : inbound_) {
    inbound.target = nullptr;
    inbound.is_dropped = true;
  }
}

bool Mailbox::is_anything_new() {
  for (const auto& message : sends_)
    if (at_.channel_bytes - (written(rank_, message->peer) - load_acquire(read(rank_, message->peer))) >= sizeof(Frame)) return true;
  for (int from = 0; from < ranks_; ++from)
    if ((is_awaited(from) || inbound_[from].is_open) && load_acquire(written(from, rank_)) != read(from, rank_)) return true;
  return false;
}

void Mailbox::throw_if_failed(const Message& message) {
  if (message.error) std::rethrow_exception(message.error);
}

}  // namespace pycomm::shm
