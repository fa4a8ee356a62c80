// Memory of two ranks that changes hands with the messages that lie in it.
//
// [Note: pieces that change hands]
// A line of a channel's ring goes to the other core twice in its life: to be read there, and when the sender takes it back for a later message.
// Where messages go to and fro one trip is enough, as with regions ([Note: swapped regions]): each of two ranks begins with a few pieces. A message that fits into
// those that its sender has is written there and its frame names them; who has read it has them, and sends next in the very lines that it
// has just read. Nobody gives any back: who has sent more than has come has none left, and sends through the ring, which is as fast for what goes one way.
//
// Two ranks on Zen 3, beside the ring alone (`pycomm bench sendrecv`, and `send`, `--against` that version): messages of 4 to 32 KiB take 0.9 to 0.97 of
// the time, of 64 to 256 KiB 0.8 to 0.88, to each other as there and back. What is shorter than 2 KiB would take as long.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "layout.h"

namespace pycomm::shm {

class Pieces {
 public:
  // Those of one message, in the order of its bytes.
  using Numbers = std::array<unsigned char, 2 * kPiecesEach>;

  // `memory` is that of all of them; this rank begins with `own`, from number `first` on.
  Pieces(unsigned char* memory, std::size_t first, std::size_t own) : memory_(memory), first_(first), own_(own) {}

  // Whether a message may lie in some.
  static bool may_hold(std::size_t bytes) { return bytes >= kFrom && bytes <= 2 * kPiecesEach * kPieceBytes; }
  // What this rank begins with, which nobody touches before it has begun.
  unsigned char* begins_with() const { return memory_ + first_ * kPieceBytes; }
  std::size_t begins_with_bytes() const { return own_ * kPieceBytes; }
  bool has_begun() const { return has_begun_; }
  void begin() {
    has_begun_ = true;
    for (std::size_t i = 0; i < own_; ++i) here_.push_back(static_cast<unsigned char>(first_ + i));
  }

  // Takes those for a message to send, the ones first that were read last: false if there are too few.
  bool take(std::size_t bytes, Numbers& numbers) {
    const std::size_t count = count_of(bytes);
    if (!may_hold(bytes) || count > here_.size()) return false;
    std::reverse_copy(here_.end() - static_cast<std::ptrdiff_t>(count), here_.end(), numbers.begin());
    here_.resize(here_.size() - count);
    return true;
  }
  // Those of a message that has been read are this rank's.
  void keep(std::size_t bytes, const Numbers& numbers) { here_.insert(here_.end(), numbers.begin(), numbers.begin() + static_cast<std::ptrdiff_t>(count_of(bytes))); }
  // Where a message has its byte `offset`; up to the end of that piece.
  unsigned char* at(const Numbers& numbers, std::size_t offset) const {
    return memory_ + numbers[offset / kPieceBytes] * kPieceBytes + offset % kPieceBytes;
  }

 private:
  static constexpr std::size_t kFrom = 2u << 10;

  static std::size_t count_of(std::size_t bytes) { return (bytes + kPieceBytes - 1) / kPieceBytes; }

  unsigned char* memory_;
  std::size_t first_, own_;
  bool has_begun_ = false;
  std::vector<unsigned char> here_;  // the numbers of those that this rank has
};

}  // namespace pycomm::shm
