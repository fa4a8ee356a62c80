#include "mailbox.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>

#include "board.h"
#include "errors.h"
#include "windows.h"

namespace pycomm::shm {
namespace {

constexpr std::size_t kMostAtOnce = 256 * 1024;  // so much moves before other threads get a turn
constexpr int kSpins = 200, kSpinsCrowded = 40;  // before a rank yields; where ranks share a core, the latter
constexpr int kLooksASpin = 4;                   // between which other threads may get in
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

// Whether the bytes begin on the line after their frame: else they share it.
bool Mailbox::is_apart(const Frame& frame) { return frame.bytes > kLine - sizeof(Frame); }

// What there must be room for, for `message` to go on.
std::size_t Mailbox::next_piece(const Message& message, const ChannelWriter& channel) {
  return message.is_framed ? std::min(message.bytes - message.moved, channel.left()) : sizeof(Frame);
}

Mailbox::Mailbox(unsigned char* area, const AreaLayout& at, Waiter::Setup setup, std::string group, Populate populate)
    : area_(area), at_(at), rank_(setup.rank), ranks_(setup.ranks), spins_(setup.ranks_per_core > 1 ? kSpinsCrowded : kSpins), waiter_(std::move(setup)), populate_(std::move(populate)) {
  waiter_.name(std::move(group), &messages_);
  auto* const counters = reinterpret_cast<LineCounter*>(area + at.mail_counters);
  const auto written = [&](int from, int to) -> std::uint64_t& { return counters[2 * (from * ranks_ + to)].value; };
  const auto read = [&](int from, int to) -> std::uint64_t& { return counters[2 * (from * ranks_ + to) + 1].value; };
  for (int r = 0; r < ranks_; ++r) {
    outbound_.push_back({ChannelWriter(ring(rank_, r), at_.channel_bytes, written(rank_, r), read(rank_, r)), {}});
    inbound_.push_back({ChannelReader(ring(r, rank_), at_.channel_bytes, read(r, rank_), written(r, rank_)), {}, {}, {}, {}, {}, {}, {}, {}});
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
  if (message->is_send) {
    Outbound& outbound = outbound_[message->peer];
    if (!outbound.is_populated) populate_(static_cast<std::size_t>(ring(rank_, message->peer) - area_), at_.channel_bytes);
    outbound.is_populated = true;
    outbound.messages.push_back(message);
    ++sends_;
  } else {
    receives_.push_back(message);
    if (take_aside(*message)) return message;
  }
  progress();
  if (message->is_done) return message;
  if (!helper_.joinable()) helper_ = std::thread([this] { help(); });
  if (helper_rests_) called_.notify_all();
  return message;
}

bool Mailbox::test(const std::shared_ptr<Message>& message) {
  const auto lock = enter();
  if (!message->is_done) progress();
  if (message->is_done) throw_if_failed(*message);
  return message->is_done;
}

void Mailbox::wait(const std::shared_ptr<Message>& message, std::int64_t timeout_ns) {
  const char* doing = message->is_send ? "send" : "recv";
  auto lock = enter();
  ++onlookers_;
  while (is_driven_ && !message->is_done) {
    waiter_.about_to_block();
    changed_.wait_for(lock, std::chrono::milliseconds(1));
  }
  --onlookers_;
  if (message->is_done) return throw_if_failed(*message);
  is_driven_ = true;
  Deadline deadline{timeout_ns};
  std::int64_t idle_since = 0;  // when the spinning ended
  const OnBoard on_board(log_);
  try {
    for (int idle = 0; !message->is_done; ++idle) {
      for (int look = 0; look < kLooksASpin && !is_anything_new(); ++look) pause();
      const bool moved = progress();
      if (message->is_done) break;
      const int peer = message->peer;  // another thread's progress may find out who the sender is
      lock.unlock();
      if (moved) {
        idle = 0;
      } else if (idle < spins_) {
        pause();
      } else if (idle == spins_) {
        waiter_.about_to_block();
        idle_since = monotonic_ns();
        if (deadline.at_ns == 0) deadline.at_ns = idle_since + timeout_ns;
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

// What goes and what comes moves by turns; see [Note: by turns] in stores.h.
bool Mailbox::progress() {
  receivers_.clear();
  senders_.clear();
  for (int r = 0; r < ranks_; ++r) {
    if (!outbound_[r].messages.empty()) receivers_.push_back(r);
    if (inbound_[r].is_open || is_awaited(r)) senders_.push_back(r);
  }
  const std::size_t turn = receivers_.empty() || senders_.empty() ? kPieceBytes : kBlock;
  bool moved = false, moves = true;
  for (std::size_t bytes = 0; moves && bytes < kMostAtOnce; bytes += turn) {
    moves = false;
    for (const int r : receivers_) moves |= push(outbound_[r], turn);
    for (const int r : senders_) moves |= pull(r, turn);
    moved |= moves;
  }
  bool tells = false;
  for (const int r : receivers_) tells |= outbound_[r].channel.tell();
  for (const int r : senders_) tells |= inbound_[r].channel.tell();
  if (tells) waiter_.published();
  return moved;
}

bool Mailbox::push(Outbound& outbound, std::size_t most) {
  ChannelWriter& channel = outbound.channel;
  bool moved = false;
  while (!outbound.messages.empty()) {
    Message& message = *outbound.messages.front();
    if (!message.is_framed) {
      if (!channel.has_room(sizeof(Frame))) return moved;
      const Frame frame{message.bytes, message.tag};
      channel.write(&frame, sizeof frame);
      if (is_apart(frame)) channel.go_to_next_line();
      message.is_framed = moved = true;
    }
    while (message.moved < message.bytes) {
      const std::size_t piece = next_piece(message, channel), count = std::min(piece, most);
      if (count == 0 || !channel.has_room(piece)) return moved;
      channel.write(message.data + message.moved, count);
      message.moved += count;
      most -= count;
      moved = true;
      if (channel.is_between_pieces() && channel.tell()) waiter_.published();
    }
    channel.end_message();
    message.is_done = true;
    outbound.messages.pop_front();
    --sends_;
  }
  return moved;
}

bool Mailbox::is_awaited(int from) const {
  return std::any_of(receives_.begin(), receives_.end(), [from](const auto& m) { return m->peer < 0 || m->peer == from; });
}

bool Mailbox::pull(int from, std::size_t most) {
  Inbound& inbound = inbound_[from];
  ChannelReader& channel = inbound.channel;
  bool moved = false;
  for (;;) {
    if (!inbound.is_open) {
      if (!channel.has(sizeof(Frame)) || !is_awaited(from)) return moved;
      open_inbound(from);
      moved = true;
    }
    while (inbound.moved < inbound.frame.bytes) {
      const std::size_t piece = std::min(inbound.frame.bytes - inbound.moved, channel.left()), count = std::min(piece, most);
      if (count == 0 || !channel.has(piece)) return moved;
      if (inbound.target) {
        channel.read(inbound.target->data + inbound.moved, count, inbound.is_streamed);
      } else if (!inbound.is_dropped) {
        channel.read(inbound.aside.data() + inbound.moved, count);
      } else {
        channel.skip(count);
      }
      if (count < piece) channel.ask_for(count);
      inbound.moved += count;
      most -= count;
      moved = true;
      if (channel.is_between_pieces() && channel.tell()) waiter_.published();
    }
    close_inbound(inbound);
  }
}

void Mailbox::open_inbound(int from) {
  Inbound& inbound = inbound_[from];
  inbound.channel.read(&inbound.frame, sizeof(Frame));
  if (is_apart(inbound.frame)) inbound.channel.go_to_next_line();
  inbound.is_open = true;
  inbound.is_streamed = streams_output(inbound.frame.bytes);
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

void Mailbox::close_inbound(Inbound& inbound) {
  inbound.channel.end_message();
  inbound.is_open = false;
  if (inbound.is_streamed) store_fence();
  if (inbound.target) {
    inbound.target->is_done = true;
    receives_.remove(inbound.target);
    inbound.target = nullptr;
  } else if (!inbound.is_dropped) {
    inbound.set_aside.push_back({inbound.frame, std::move(inbound.aside)});
    // Somebody may have asked for it while it came.
    const auto asked = receives_;
    for (const auto& message : asked)
      if (take_aside(*message)) break;
  }
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
  if (message->is_send) {
    auto& messages = outbound_[message->peer].messages;
    const auto it = std::find(messages.begin(), messages.end(), message);
    if (it != messages.end()) {
      messages.erase(it);
      --sends_;
    }
  }
  receives_.remove(message);
  // Half a message cannot be called back: the receiver would take the next one for its rest.
  if (message->is_send && message->is_framed) fail_all(std::current_exception());
}

void Mailbox::fail_all(const std::exception_ptr& error) {
  broken_ = error;
  const auto fail = [&](const std::shared_ptr<Message>& message) {
    message->error = error;
    message->is_done = true;
  };
  for (Outbound& outbound : outbound_) {
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

bool Mailbox::is_anything_new() {
  for (Outbound& outbound : outbound_)
    if (!outbound.messages.empty() && outbound.channel.has_room(next_piece(*outbound.messages.front(), outbound.channel))) return true;
  for (int from = 0; from < ranks_; ++from)
    if ((inbound_[from].is_open || is_awaited(from)) && inbound_[from].channel.has_any()) return true;
  return false;
}

void Mailbox::throw_if_failed(const Message& message) {
  if (message.error) std::rethrow_exception(message.error);
}

}  // namespace pycomm::shm
