#include "scheduler.h"

#include <algorithm>

namespace pycomm::overlap {

std::uint64_t Scheduler::add(std::int64_t priority, std::size_t segments, std::size_t segment_bytes) {
  items_.push_back({++submitted_, priority, segments, segment_bytes});
  return submitted_;
}

std::vector<Granted> Scheduler::grant(std::uint64_t agreed, double bytes_per_s) {
  std::vector<Item*> ready;
  for (Item& item : items_)
    if (item.number <= agreed) ready.push_back(&item);
  std::stable_sort(ready.begin(), ready.end(), [](const Item* a, const Item* b) { return a->priority > b->priority; });
  double credit_bytes = bytes_per_s * kGrantS;
  std::vector<Granted> chosen;
  for (Item* item : ready) {
    const auto bytes = static_cast<double>(item->segment_bytes);
    while (!item->is_done() && (chosen.empty() || bytes <= credit_bytes)) {
      chosen.push_back({item->number, item->granted++});
      credit_bytes -= bytes;
    }
    if (!item->is_done()) break;
  }
  items_.erase(std::remove_if(items_.begin(), items_.end(), [](const Item& item) { return item.is_done(); }), items_.end());
  return chosen;
}

void Scheduler::drop(std::uint64_t number) {
  items_.erase(std::remove_if(items_.begin(), items_.end(), [&](const Item& item) { return item.number == number; }), items_.end());
}

}  // namespace pycomm::overlap
