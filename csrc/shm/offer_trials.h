// Whether offers are worth it, found out by the exchanges themselves.
//
// [Note: trials of offers]
// What an exchange takes by offers and through the channel depends on where the two cores are: 128 KiB on Zen 5 11.8 and 7.2 us within one L3, 12.6 and
// 27.0 between two; and a host may move a virtual machine's cores at any time. No call of all ranks, as a collective is, lets
// them try that. So of a thousand exchanges with a rank the first few go through the channel and the next few by offers,
// each rank takes the times of its own, and sends the rest as was usually faster. What goes the one way or the other disturbs the next
// few (whose cache holds which lines), so the times of only half of them are taken; nor does the first walk through the
// channel, whose lines the reader never had, tell anything.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

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
  struct Lengths {
    unsigned exchanges = 0;
    std::vector<std::int64_t> times_ns;  // of the way that is being tried
    std::int64_t usual_ns[2] = {};       // through the channel, and by offers
  };
  Lengths& lengths_of(std::size_t bytes);

  std::array<Lengths, 9> lengths_;  // from kOfferFrom on, each twice as long as the one before
  Lengths* timed_ = nullptr;        // those of the exchange under way, if its time is taken
  bool by_offer_ = false;           // and which way it goes
  std::int64_t start_ns_ = 0;
  std::shared_ptr<Message> sent_, received_;
};

}  // namespace pycomm::shm
