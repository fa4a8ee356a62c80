// What moves the bytes of messages through the channels, or from memory to memory. All of it runs with the mailbox's mutex held.
#include <algorithm>
#include <iterator>

#include "errors.h"
#include "mailbox.h"
#include "stores.h"

namespace pycomm::shm {
namespace {

constexpr std::size_t kMostAtOnce = 256 * 1024;  // so much moves before other threads get a turn

}  // namespace

// Whether the bytes begin on the line after their frame: else they share it.
bool Mailbox::is_apart(const Frame& frame) { return frame.bytes > kLine - sizeof(Frame); }

// What there must be room for, for `message` to go on.
std::size_t Mailbox::next_piece(const Message& message, const ChannelWriter& channel) {
  return message.is_framed ? std::min(message.bytes - message.moved, channel.left()) : sizeof(Frame);
}

bool Mailbox::is_anything_new() {
  for (Outbound& outbound : outbound_) {
    if (outbound.messages.empty()) continue;
    const Message& message = *outbound.messages.front();
    if (message.is_offered ? outbound.offer.state() > Offer::kTaken : outbound.channel.has_room(next_piece(message, outbound.channel))) return true;
  }
  for (int from = 0; from < ranks_; ++from)
    if ((inbound_[from].is_open || is_awaited(from)) && inbound_[from].channel.has_any()) return true;
  return false;
}

// What goes and what comes moves by turns; see [Note: by turns] in stores.h.
bool Mailbox::progress() {
  receivers_.clear();
  senders_.clear();
  for (int r = 0; r < ranks_; ++r) {
    if (!outbound_[r].messages.empty()) receivers_.push_back(r);
    if (inbound_[r].is_open || is_awaited(r)) senders_.push_back(r);
  }
  const bool by_turns = !receivers_.empty() && !senders_.empty();
  bool moved = false, moves = true;
  for (std::size_t bytes = 0; moves && bytes < kMostAtOnce;) {
    if (bytes > kPieceBytes) waiter_.about_to_block();  // not for a short one, after which the second look finds nothing
    moves = false;
    std::size_t turn = by_turns ? kString : kPieceBytes;
    for (const int r : receivers_) {
      moves |= push(outbound_[r], by_turns);
      if (by_turns) turn = std::max(turn, outbound_[r].turn);
    }
    for (const int r : senders_) moves |= pull(r, by_turns);
    moved |= moves;
    bytes += turn;
  }
  for (const int r : senders_)
    if (inbound_[r].channel.tell()) waiter_.published(r);
  return moved;
}

bool Mailbox::push(Outbound& outbound, bool by_turns) {
  ChannelWriter& channel = outbound.channel;
  bool moved = false;
  std::size_t pushed = 0;
  while (!outbound.messages.empty()) {
    Message& message = *outbound.messages.front();
    if (!message.is_framed) {
      if (!channel.has_room(sizeof(Frame))) return moved;
      write_frame(outbound);
      if (message.is_offered && channel.tell()) waiter_.published(outbound.to);
      moved = true;
    }
    if (message.is_offered && is_offer_open(outbound, message)) return moved;
    const std::size_t most = by_turns ? outbound.turn : kPieceBytes;
    if (most > kPieceBytes && message.bytes > kPieceBytes) waiter_.about_to_block();
    while (message.moved < message.bytes) {
      const std::size_t piece = next_piece(message, channel), count = std::min(piece, most - std::min(pushed, most));
      if (count == 0 || !channel.has_room(piece)) return moved;
      unsigned char* const place = outbound.is_in_pieces ? pieces_[outbound.to].at(outbound.numbers, message.moved) : channel.here();
      channel.write_to(place, message.data + message.moved, count, is_long(message.bytes));
      message.moved += count;
      pushed += count;
      moved = true;
      if (channel.is_between_pieces() && channel.tell()) waiter_.published(outbound.to);
    }
    channel.end_message();
    if (channel.tell()) waiter_.published(outbound.to);
    message.is_done = true;
    outbound.trials.look();
    outbound.messages.pop_front();
    --sends_;
  }
  return moved;
}

Going Mailbox::way_of(Outbound& outbound, const std::shared_ptr<Message>& message) {
  if (message->bytes < kOfferFrom) return Going::kAtOnce;
  const auto is_exchanged = [&](const auto& other) { return other->peer == outbound.to && other->bytes >= kOfferFrom; };
  const auto received = std::find_if(receives_.begin(), receives_.end(), is_exchanged);
  if (received == receives_.end() || outbound.to == rank_) return Going::kByTurns;
  const bool may_offer = outbound.may_offer && is_offerable(message->bytes) && is_offerable((*received)->bytes);
  if (offers_) return *offers_ && may_offer ? Going::kOffered : Going::kByTurns;
  return outbound.channel.is_walked() ? outbound.trials.way(message, *received, may_offer) : Going::kByTurns;
}

void Mailbox::write_frame(Outbound& outbound) {
  Message& message = *outbound.messages.front();
  message.is_framed = true;
  const Going way = way_of(outbound, outbound.messages.front());
  message.is_offered = way == Going::kOffered;
  outbound.turn = way == Going::kAtOnce ? kMostAtOnce : kString;
  outbound.is_in_pieces = !message.is_offered && pieces_[outbound.to].take(message.bytes, outbound.numbers);
  const Where where = message.is_offered ? Where::kOffered : outbound.is_in_pieces ? Where::kPieces : Where::kRing;
  const Frame frame{message.bytes, static_cast<std::int32_t>(message.tag), where};
  outbound.channel.write(&frame, sizeof frame);
  if (outbound.is_in_pieces) {
    outbound.channel.write(&outbound.numbers, sizeof outbound.numbers);
    outbound.channel.go_to_next_piece();
  } else if (message.is_offered) {
    const Place place{source_of(message.data), ++outbound.offers};
    outbound.looks = 0;
    outbound.offer.make(place.offer);
    outbound.channel.write(&place, sizeof place);
    outbound.channel.end_message();
  } else if (is_apart(frame)) {
    outbound.channel.go_to_next_line();
  }
}

bool Mailbox::is_offer_open(Outbound& outbound, Message& message) {
  const Offer::State state = outbound.offer.state();
  if (state == Offer::kTaken) return true;
  const bool is_patient = message.bytes > at_.channel_bytes || ++outbound.looks < looks_at_offer(message.bytes);
  if (state == Offer::kOffered && (is_patient || !outbound.offer.withdraw(outbound.offers))) return true;
  if (state == Offer::kRead) message.moved = message.bytes;
  else outbound.trials.drop();
  if (state == Offer::kRefused) outbound.may_offer = false;
  message.is_offered = false;
  return false;
}

bool Mailbox::is_awaited(int from) const {
  return std::any_of(receives_.begin(), receives_.end(), [from](const auto& m) { return m->peer < 0 || m->peer == from; });
}

bool Mailbox::pull(int from, bool by_turns) {
  Inbound& inbound = inbound_[from];
  ChannelReader& channel = inbound.channel;
  std::size_t most = by_turns ? outbound_[from].turn : kPieceBytes;
  bool moved = false;
  for (;;) {
    if (!inbound.is_open) {
      if (!channel.has(sizeof(Frame)) || !is_awaited(from)) return moved;
      open_inbound(from);
      if (inbound.frame.where == Where::kOffered) take_offer(from);
      moved = true;
    }
    if (most > kPieceBytes && inbound.frame.bytes > kPieceBytes) waiter_.about_to_block();
    while (inbound.moved < inbound.frame.bytes) {
      const std::size_t piece = std::min(inbound.frame.bytes - inbound.moved, channel.left()), count = std::min(piece, most);
      if (count == 0 || !channel.has(piece)) return moved;
      const bool is_in_pieces = inbound.frame.where == Where::kPieces;
      const unsigned char* const place = is_in_pieces ? pieces_[from].at(inbound.numbers, inbound.moved) : channel.here();
      if (inbound.target && inbound.result->is_streamed()) {
        channel.read_past_the_caches(place, inbound.target->data + inbound.moved, count);
      } else if (inbound.target) {
        channel.read_from(place, inbound.target->data + inbound.moved, count, is_long(inbound.frame.bytes));
      } else if (!inbound.is_dropped) {
        channel.read_from(place, inbound.aside.data() + inbound.moved, count, false);
      } else {
        channel.skip(count);
      }
      if (count < piece) ask_to_read(place + count, std::min(count, piece - count));
      inbound.moved += count;
      most -= count;
      moved = true;
      if (channel.is_between_pieces() && channel.tell()) waiter_.published(from);
    }
    if (inbound.frame.where == Where::kPieces) pieces_[from].keep(inbound.frame.bytes, inbound.numbers);
    close_inbound(inbound);
    outbound_[from].trials.look();
  }
}

void Mailbox::open_inbound(int from) {
  Inbound& inbound = inbound_[from];
  inbound.channel.read(&inbound.frame, sizeof(Frame));
  if (inbound.frame.where == Where::kPieces) {
    inbound.channel.read(&inbound.numbers, sizeof inbound.numbers);
    inbound.channel.go_to_next_piece();
  } else if (inbound.frame.where == Where::kOffered) {
    inbound.channel.read(&inbound.place, sizeof(Place));
    inbound.channel.end_message();
  } else if (is_apart(inbound.frame)) {
    inbound.channel.go_to_next_line();
  }
  inbound.is_open = true;
  inbound.result.emplace(false);
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
  if (!target->is_done) {
    if (inbound.frame.where != Where::kOffered) inbound.result.emplace(results_.of(target->data, target->bytes, target->bytes)).begin();
    return;
  }
  inbound.is_dropped = true;  // lengths differ: the bytes go nowhere
  inbound.target = nullptr;
  forget_receive(*target);
}

void Mailbox::take_offer(int from) {
  Inbound& inbound = inbound_[from];
  if (!inbound.offer.take(inbound.place.offer)) return;
  waiter_.about_to_block();
  void* const to = inbound.target ? inbound.target->data : inbound.aside.data();
  const bool has_read = inbound.is_dropped || read_memory(pids_[from], inbound.place.source, 0, to, inbound.frame.bytes);
  if (has_read) inbound.moved = inbound.frame.bytes;
  inbound.offer.answer(inbound.place.offer, has_read);
  waiter_.published(from);
}

void Mailbox::close_inbound(Inbound& inbound) {
  inbound.channel.end_message();
  inbound.is_open = false;
  if (inbound.result->is_streamed()) store_fence();
  inbound.result.reset();
  if (inbound.target) {
    inbound.target->is_done = true;
    forget_receive(*inbound.target);
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

void Mailbox::forget_receive(const Message& message) {
  const auto it = std::find_if(receives_.begin(), receives_.end(), [&](const auto& other) { return other.get() == &message; });
  if (it != receives_.end()) receives_.erase(it);
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
    forget_receive(message);
    return true;
  }
  return false;
}

}  // namespace pycomm::shm
