// How messages that two ranks send each other go, found out by the exchanges themselves.
//
// [Note: trials of exchanges]
// What an exchange takes by offers and through the channel depends on where the two cores are: 128 KiB on Zen 5 11.8 and 7.2 us within one L3, 12.6 and
// 18.1 between two. And so it does whether a rank writes and reads by turns, or all that it sends and then what has come: 1 MiB 88 and 92 us within one
// L3, 150 and 105 between two. A host may move a virtual machine's cores at any time, and no call of all ranks, as a collective is, lets
// them try that. So each rank takes the times of a few of its exchanges with each other one, of each class of lengths.
#pragma once

#include <cstdint>
#include <memory>

#include "by_length.h"
#include "few_ways.h"
#include "offer.h"

namespace pycomm::shm {

struct Message;

enum class Going : unsigned char { kByTurns, kOffered, kAtOnce };

class ExchangeTrials {  // of one ordered pair of ranks, at the sender
 public:
  // Of an exchange that begins, with `received` awaited from whom `sent` goes to: how that goes.
  Going way(const std::shared_ptr<Message>& sent, const std::shared_ptr<Message>& received, bool may_offer);
  // The offer of the exchange under way has come to nothing, so its time tells nothing.
  void drop() { timed_ = nullptr; }
  // To be called when a message has ended: takes the time if it was the last of its exchange.
  void look();

 private:
  using Ways = FewWays<3>;

  ByLength<Ways, 9, 2 * kOfferFrom, 2> ways_;
  Ways* timed_ = nullptr;  // those of the exchange under way, if its time is taken
  Going way_{};            // and the one that it goes
  std::int64_t start_ns_ = 0;
  std::shared_ptr<Message> sent_, received_;
};

}  // namespace pycomm::shm
