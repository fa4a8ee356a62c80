#include "offer_trials.h"

#include <algorithm>
#include <limits>

#include "mailbox.h"
#include "offer.h"
#include "wait.h"

namespace pycomm::shm {
namespace {

constexpr unsigned kTriedEvery = 1024, kTriedEach = 16;  // exchanges of a length, and those of them that go either way

}  // namespace

OfferTrials::Lengths& OfferTrials::lengths_of(std::size_t bytes) {
  std::size_t i = 0;
  while (i + 1 < lengths_.size() && bytes >= kOfferFrom << (i + 1)) ++i;
  return lengths_[i];
}

bool OfferTrials::offers(const std::shared_ptr<Message>& sent, const std::shared_ptr<Message>& received) {
  Lengths& lengths = lengths_of(sent->bytes);
  const unsigned number = lengths.exchanges++ % kTriedEvery;
  if (number >= 2 * kTriedEach) return lengths.usual_ns[true] < lengths.usual_ns[false];
  const bool by_offer = number >= kTriedEach;
  if (number % kTriedEach == 0) {
    lengths.times_ns.clear();
    lengths.usual_ns[by_offer] = std::numeric_limits<std::int64_t>::max();  // where all come to nothing
  }
  if (number % kTriedEach < kTriedEach / 2) return by_offer;
  timed_ = &lengths;
  by_offer_ = by_offer;
  sent_ = sent;
  received_ = received;
  start_ns_ = monotonic_ns();
  return by_offer;
}

void OfferTrials::look() {
  if (timed_ == nullptr || !sent_->is_done || !received_->is_done) return;
  std::vector<std::int64_t>& times_ns = timed_->times_ns;
  times_ns.push_back(monotonic_ns() - start_ns_);
  const auto middle = times_ns.begin() + static_cast<std::ptrdiff_t>(times_ns.size() / 2);
  std::nth_element(times_ns.begin(), middle, times_ns.end());
  timed_->usual_ns[by_offer_] = *middle;
  timed_ = nullptr;
}

}  // namespace pycomm::shm
