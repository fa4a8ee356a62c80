#include "exchange_trials.h"

#include "mailbox.h"
#include "wait.h"

namespace pycomm::shm {
namespace {

// What is longer leaves less of what went before in the caches, and takes longer to try.
constexpr std::size_t kSeldomFrom = 1u << 20;
constexpr unsigned kSeldom = 16;

}  // namespace

Going ExchangeTrials::way(const std::shared_ptr<Message>& sent, const std::shared_ptr<Message>& received, bool may_offer) {
  Ways& ways = ways_.of(sent->bytes);
  const auto way = static_cast<Going>(sent->bytes < kSeldomFrom ? ways.choose() : ways.choose(kSeldom));
  if (way == Going::kOffered && !may_offer) return Going::kByTurns;
  if (!ways.is_timed()) return way;
  timed_ = &ways;
  way_ = way;
  sent_ = sent;
  received_ = received;
  start_ns_ = monotonic_ns();
  return way;
}

void ExchangeTrials::look() {
  if (timed_ == nullptr || !sent_->is_done || !received_->is_done) return;
  timed_->took(static_cast<unsigned>(way_), static_cast<double>(monotonic_ns() - start_ns_));
  timed_ = nullptr;
}

}  // namespace pycomm::shm
