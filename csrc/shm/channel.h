// The two ends of a channel: a ring of bytes from one rank to another, for point-to-point messages.
//
// The ring is divided into pieces. Each end counts what has passed it and tells the other one at the end of a piece and of
// a message, since every time costs both ends a trip of a cache line. And it waits until a piece, or what a message takes of
// it, is whole: with less, two ends that keep pace would soon tell each other of every line. Each message begins on a
// line of its own, so that no line is read while it is written. What lies elsewhere ([Note: pieces that change hands]) counts as if it lay here, from
// the beginning of a piece on.
//
// Whether to copy by blocks or by strings each end finds out by its own time, as it waits for the lines that it stores to, and for those of a
// long message, which may lie in memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "few_ways.h"
#include "stores.h"
#include "wait.h"

namespace pycomm::shm {

class ChannelEnd {
 public:
  // A ring of whole pieces; `own` counts what has passed this end, `other` what has passed the other one.
  ChannelEnd(unsigned char* ring, std::size_t ring_bytes, std::uint64_t& own, const std::uint64_t& other)
      : ring_(ring), ring_bytes_(ring_bytes), own_(own), other_(other), at_(own), whole_(own), told_(own), seen_(load_acquire(other)) {}

  // Where the next bytes lie.
  unsigned char* here() const { return ring_ + at_ % ring_bytes_; }
  // How much of the piece is left: the most that is read or written at a time.
  std::size_t left() const { return kPieceBytes - at_ % kPieceBytes; }
  bool is_between_pieces() const { return whole_ == at_; }
  // Whether it has been round the ring, whose lines the other end never had before: that is not as all that comes after it.
  bool is_walked() const { return at_ >= ring_bytes_; }
  // Tells the other end how far this one is with whole pieces and messages; true if there was anything to tell.
  bool tell() {
    if (told_ == whole_) return false;
    store_release(own_, told_ = whole_);
    return true;
  }
  void go_to_next_line() { go_on(round_up(at_, kLine) - at_); }
  void go_to_next_piece() { go_on(round_up(at_, kPieceBytes) - at_); }
  void end_message() {
    go_to_next_line();
    whole_ = at_;
  }

 protected:
  void go_on(std::size_t bytes) {
    at_ += bytes;
    if (at_ % kPieceBytes == 0) whole_ = at_;
  }
  // Copies a part of a long message, or of another one.
  template <class ByBlocks>
  void copy(void* to, const void* from, std::size_t count, bool is_long, ByBlocks by_blocks) {
    if (count < kString || !is_walked()) return by_blocks();
    Attempt<2> attempt(ways_[is_long], count);
    attempt.begin();
    attempt.way() != 0 ? copy_by_strings(to, from, count) : by_blocks();
  }

  unsigned char* ring_;
  std::size_t ring_bytes_;
  std::uint64_t& own_;
  const std::uint64_t& other_;
  std::uint64_t at_, whole_;     // how far this end is, and where the last piece or message ended
  std::uint64_t told_, seen_;    // what the other end knows of this one, and what this one knows of it

 private:
  FewWays<2> ways_[2];
};

class ChannelWriter : public ChannelEnd {
 public:
  using ChannelEnd::ChannelEnd;

  bool has_room(std::size_t bytes) {
    if (at_ + bytes <= seen_ + ring_bytes_) return true;
    seen_ = load_acquire(other_);
    return at_ + bytes <= seen_ + ring_bytes_;
  }
  void write(const void* bytes, std::size_t count) { write_to(here(), bytes, count, false); }
  // To where they lie; a part of a long message, or of another one.
  void write_to(unsigned char* place, const void* bytes, std::size_t count, bool is_long) {
    copy(place, bytes, count, is_long, [&] { copy_by_blocks(place, bytes, count); });
    go_on(count);
  }
};

class ChannelReader : public ChannelEnd {
 public:
  using ChannelEnd::ChannelEnd;

  bool has(std::size_t bytes) {
    if (at_ + bytes <= seen_) return true;
    seen_ = load_acquire(other_);
    return at_ + bytes <= seen_;
  }
  // Whether more has come than was read. Asks for the line in which it would be.
  bool has_any() const {
    __builtin_prefetch(here());
    return load_acquire(other_) > at_;
  }
  void read(void* bytes, std::size_t count) { read_from(here(), bytes, count, false); }
  // From where they lie; a part of a long message, or of another one.
  void read_from(const unsigned char* place, void* bytes, std::size_t count, bool is_long) {
    copy(bytes, place, count, is_long, [&] { keep_by_blocks(bytes, place, count); });
    go_on(count);
  }
  // The same past the caches; store_fence() has to follow the last one.
  void read_past_the_caches(const unsigned char* place, void* bytes, std::size_t count) {
    copy_streamed_unfenced(bytes, place, count);
    go_on(count);
  }
  void skip(std::size_t count) { go_on(count); }
};

}  // namespace pycomm::shm
