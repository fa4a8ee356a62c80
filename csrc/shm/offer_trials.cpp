#include "offer_trials.h"

#include "mailbox.h"
#include "wait.h"

namespace pycomm::shm {

bool OfferTrials::offers(const std::shared_ptr<Message>& sent, const std::shared_ptr<Message>& received) {
  TwoWays& ways = ways_.of(sent->bytes);
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
