#include "offer_trials.h"

#include "mailbox.h"
#include "offer.h"
#include "wait.h"

namespace pycomm::shm {

TwoWays& OfferTrials::ways_of(std::size_t bytes) {
  std::size_t i = 0;
  while (i + 1 < ways_.size() && bytes >= kOfferFrom << (i + 1)) ++i;
  return ways_[i];
}

bool OfferTrials::offers(const std::shared_ptr<Message>& sent, const std::shared_ptr<Message>& received) {
  TwoWays& ways = ways_of(sent->bytes);
  const bool by_offer = ways.choose();
  if (!ways.is_timed()) return by_offer;
  timed_ = &ways;
  by_offer_ = by_offer;
  sent_ = sent;
  received_ = received;
  start_ns_ = monotonic_ns();
  return by_offer;
}

void OfferTrials::look() {
  if (timed_ == nullptr || !sent_->is_done || !received_->is_done) return;
  timed_->took(by_offer_, static_cast<double>(monotonic_ns() - start_ns_));
  timed_ = nullptr;
}

}  // namespace pycomm::shm
