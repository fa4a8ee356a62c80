// Whether offers are worth it, found out by the exchanges themselves.
//
// [Note: trials of offers]
// What an exchange takes by offers and through the channel depends on where the two cores are: 128 KiB on Zen 5 11.8 and 7.2 us within one L3, 12.6 and
// 18.1 between two; and a host may move a virtual machine's cores at any time. No call of all ranks, as a collective is, lets
// them try that. So each rank takes the times of a few of its exchanges with each other one, of each class of lengths.
#pragma once

#include <cstdint>
#include <memory>

#include "by_length.h"
#include "offer.h"
#include "two_ways.h"

namespace pycomm::shm {

struct Message;

class OfferTrials {  // of one ordered pair of ranks, at the sender
 public:
  // Of an exchange that begins, with `received` awaited from whom `sent` goes to: whether `sent` is to be offered.
  bool offers(const std::shared_ptr<Message>& sent, const std::shared_ptr<Message>& received);
  // The offer of the exchange under way has come to nothing, so its time tells nothing.
  void drop() { timed_ = nullptr; }
  // To be called when a message has ended: takes the time if it was the last of its exchange.
  void look();

 private:
  ByLength<TwoWays, 9, 2 * kOfferFrom, 2> ways_;
  TwoWays* timed_ = nullptr;  // those of the exchange under way, if its time is taken
  bool by_offer_ = false;     // and which way it goes
  std::int64_t start_ns_ = 0;
  std::shared_ptr<Message> sent_, received_;
};

}  // namespace pycomm::shm
