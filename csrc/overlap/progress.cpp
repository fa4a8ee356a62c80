#include "progress.h"

#include <algorithm>
#include <utility>

#include "../clock.h"

namespace pycomm::overlap {
namespace {

constexpr double kFirstSPerByte = 1e-9;  // before anything was measured
constexpr double kWeight = 0.25;         // of the last segment in the time for a byte

}  // namespace

Progress::Progress(int ranks, std::size_t segment_bytes) : ranks_(ranks), segment_bytes_(segment_bytes), s_per_byte_(kFirstSPerByte) {}

std::uint64_t Progress::submit(Order order) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::uint64_t number = scheduler_.add(order.priority, order.segments, order.segment_bytes);
  agreement_.add(order.digest);
  items_.emplace(number, Item{order.segments, order.segment_bytes, std::move(order.move)});
  changed_.notify_one();
  return number;
}

void Progress::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  changed_.notify_one();
}

std::vector<Progress::Ended> Progress::collect() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(ended_, {});
}

std::vector<Progress::Ended> Progress::await_ended() {
  std::unique_lock<std::mutex> lock(mutex_);
  ended_changed_.wait(lock, [this] { return !ended_.empty() || is_over_; });
  return std::exchange(ended_, {});
}

Progress::Moved Progress::take_moved() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(moved_, {});
}

// -- the loop -------------------------------------------------------------------------------------------------------------

void Progress::run(Outside& outside) {
  while (await_work(outside)) move_some(outside);
  const std::lock_guard<std::mutex> lock(mutex_);
  is_over_ = true;
  ended_changed_.notify_one();
}

bool Progress::await_work(Outside& outside) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (scheduler_.has_work()) return true;
  lock.unlock();
  outside.rest();
  lock.lock();
  changed_.wait(lock, [this] { return scheduler_.has_work() || is_closed_; });
  return scheduler_.has_work();
}

void Progress::move_some(Outside& outside) {
  std::vector<Frame> frames(static_cast<std::size_t>(ranks_));
  Frame mine;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    mine = agreement_.frame(1.0 / s_per_byte_);
  }
  try {
    outside.exchange(frames.data(), mine);
  } catch (...) {  // the group is broken: nothing that was submitted can be moved
    give_up(std::current_exception());
    return outside.ended_unmoved();
  }
  Agreed agreed;
  std::vector<std::pair<Granted, bool>> chosen;  // and whether the core moves it
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    agreed = agreement_.agree(frames.data(), frames.size());
  }
  for (const std::uint64_t number : agreed.refused) refuse(number, outside);
  if (!agreed.refused.empty()) outside.ended_unmoved();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Granted& granted : scheduler_.grant(agreed.submitted, agreed.bytes_per_s)) {
      Item& item = items_.at(granted.number);
      ++item.granted;
      chosen.emplace_back(granted, item.move != nullptr);
    }
  }
  for (const auto& [granted, is_native] : chosen) {
    if (is_native) {
      move(granted);
    } else {
      outside.move(granted);
    }
  }
  outside.end_grant();
}

void Progress::refuse(std::uint64_t number, Outside& outside) {
  std::exception_ptr error;
  try {
    outside.refuse(number);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  scheduler_.drop(number);
  Item& item = items_.at(number);
  item.error = std::move(error);
  item.is_given_up = true;
  end_if_done(number, item);
}

void Progress::move(const Granted& granted) {
  const Move* move = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Item& item = items_.at(granted.number);
    if (item.error == nullptr) move = &item.move;  // which stays where it is until this segment is done
  }
  const std::int64_t start_ns = monotonic_ns();
  std::exception_ptr error;
  try {
    if (move != nullptr) (*move)(granted.segment);
  } catch (...) {
    error = std::current_exception();
  }
  ended(granted.number, start_ns, error);
}

// -- the items ------------------------------------------------------------------------------------------------------------

void Progress::ended(std::uint64_t number, std::int64_t start_ns, std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Item& item = items_.at(number);
  const std::int64_t now_ns = monotonic_ns();
  const std::int64_t elapsed_ns = now_ns - std::max(start_ns, last_end_ns_);  // what goes on at one time counts once
  last_end_ns_ = now_ns;
  moved_.ns += elapsed_ns;
  moved_.bytes += item.segment_bytes;
  // Segments end in bunches where several are under way: of their times the average is right, of their rates it is not.
  if (item.segment_bytes > 0 && item.segment_bytes >= segment_bytes_ / 2)
    s_per_byte_ += kWeight * (static_cast<double>(elapsed_ns) * 1e-9 / static_cast<double>(item.segment_bytes) - s_per_byte_);
  if (item.error == nullptr) item.error = std::move(error);
  ++item.moved;
  end_if_done(number, item);
}

void Progress::end_if_done(std::uint64_t number, const Item& item) {
  if (item.moved != (item.is_given_up ? item.granted : item.segments)) return;
  ended_.push_back({number, item.error});
  items_.erase(number);
  ended_changed_.notify_one();
}

void Progress::give_up(std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  scheduler_.give_up();
  for (auto each = items_.begin(); each != items_.end();) {
    const std::uint64_t number = each->first;
    Item& item = each->second;
    ++each;
    if (item.granted == item.segments) continue;  // its last segments are under way
    if (item.error == nullptr) item.error = error;
    item.is_given_up = true;
    end_if_done(number, item);
  }
}

}  // namespace pycomm::overlap
