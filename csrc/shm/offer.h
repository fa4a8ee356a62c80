// A message that its receiver may copy from where it lies, in the sender's memory.
//
// [Note: offers]
// What goes through a channel is copied twice, by both ranks. That is the faster way for what goes one way (64 KiB: 4 us, not 6). Where two ranks
// send each other as much, both copy twice as much; so there a longer message may be offered, where that is found to be faster
// ([Note: trials of exchanges]): its frame says where it lies, and who receives it takes the offer, reads it there (process_vm_readv) and
// says that it has. If the kernel refuses, its bytes follow through the channel. So they do if nobody takes the offer in some
// microseconds, for which the sender withdraws it, as far as the channel has room for them: a sender whose receiver computes does not wait for it.
//
// Once an offer is taken the message belongs to the receiver: the sender neither withdraws nor gives up before it is told, or the
// receiver has died. So nobody ever reads what has become of a message whose sender went on.
//
// Of an ordered pair of ranks one message at a time is offered. Its state is a word that both change, one step at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "wait.h"

namespace pycomm::shm {

// What may be. Between two ranks of Sapphire Rapids an exchange of offers takes 0.75 to 0.9 of the time from 32 KiB to 1 MiB, and 1.2 at 2 MiB;
// on Zen 5 1.4 within one L3, and between two 0.45 up to 8 MiB, 0.8 beyond.
inline constexpr std::size_t kOfferFrom = 32u << 10, kOfferTo = 8u << 20;
inline bool is_offerable(std::size_t bytes) { return bytes >= kOfferFrom && bytes <= kOfferTo; }
// How often a sender looks before it withdraws an offer: for about 15 us, and the time that a receiver may take for its last message.
inline int looks_at_offer(std::size_t bytes) { return 150 + static_cast<int>(bytes / kBytesASpin); }

class Offer {
 public:
  enum State : std::uint64_t { kOffered, kTaken, kRead, kRefused, kWithdrawn, kStates };

  explicit Offer(std::uint64_t& word) : word_(word) {}

  // The sender's.
  void make(std::uint64_t number) { store_release(word_, at(number, kOffered)); }
  State state() const { return static_cast<State>(load_acquire(word_) % kStates); }
  bool withdraw(std::uint64_t number) { return pass(word_, at(number, kOffered), at(number, kWithdrawn)); }

  // The receiver's.
  bool take(std::uint64_t number) { return pass(word_, at(number, kOffered), at(number, kTaken)); }
  void answer(std::uint64_t number, bool has_read) { store_release(word_, at(number, has_read ? kRead : kRefused)); }

 private:
  static constexpr std::uint64_t at(std::uint64_t number, State state) { return kStates * number + state; }

  std::uint64_t& word_;
};

}  // namespace pycomm::shm
