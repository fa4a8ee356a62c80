// What moves a stream on: the queue of its items, and the loop that its thread runs.
//
//   submit (any thread) -> the ranks agree -> a grant -> its segments, one after the other -> the items that ended
//
// The loop is the same on every transport. Where the core itself moves the bytes (shared memory) an item brings its own
// Move, and nothing of Python is needed to agree on it or to move it; what is not native goes `Outside`, in its turn.
//
// [Note: completion]
// Python hears of an item that has ended from a thread of its own, that sleeps in `await_ended`: so the loop never waits
// for Python's lock, which a computation may hold for long, and the ranks' items move on meanwhile. What was moved outside
// is collected there.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "agreement.h"
#include "scheduler.h"

namespace pycomm::overlap {

class Progress {
 public:
  using Move = std::function<void(std::size_t segment)>;  // throws what goes to whoever waits for the item

  struct Order {
    std::int64_t priority;
    std::uint64_t digest;  // of what has to be the same on all ranks
    std::size_t segments, segment_bytes;
    Move move;             // empty: its segments are moved outside
  };
  struct Ended {
    std::uint64_t number;
    std::exception_ptr error;  // null if it went well, or if whoever moved it keeps the error
  };
  struct Moved {
    std::int64_t ns = 0;
    std::size_t bytes = 0;
  };

  // What the loop needs of whoever runs it. Called in the thread of `run` alone, and never under the lock.
  class Outside {
   public:
    virtual ~Outside() = default;
    virtual void exchange(Frame* frames, const Frame& mine) = 0;  // every rank's frame, in rank order; throws
    virtual void refuse(std::uint64_t number) = 0;  // an item that differs between ranks: throws what goes to whoever waits for it
    virtual void move(const Granted& granted) = 0;  // begins to; `ended` is called when that is done
    virtual void ended_unmoved() = 0;               // items have ended without being moved
    virtual void end_grant() = 0;                   // returns when the next agreement is due
    virtual void rest() = 0;                        // there is nothing to do for now
  };

  // `segment_bytes` is what a large item is cut into: transfers of at least half of that measure the bandwidth.
  Progress(int ranks, std::size_t segment_bytes);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  std::uint64_t submit(Order order);  // returns the item's number
  // The loop: returns once `close` was called and every item has been granted or given up.
  void run(Outside& outside);
  void close();

  // A segment that is moved outside is done, since `start_ns` on the clock of monotonic_ns.
  void ended(std::uint64_t number, std::int64_t start_ns, std::exception_ptr error = nullptr);
  std::vector<Ended> collect();      // the items that ended since the last time
  std::vector<Ended> await_ended();  // as `collect`, once there are some; none if the loop is over
  Moved take_moved();  // what was moved since the last time, and how long that took

 private:
  struct Item {
    std::size_t segments, segment_bytes;
    Move move;
    std::size_t granted = 0, moved = 0;
    std::exception_ptr error{};
    bool is_given_up = false;
  };

  bool await_work(Outside& outside);
  void move_some(Outside& outside);
  void refuse(std::uint64_t number, Outside& outside);
  void move(const Granted& granted);
  void give_up(std::exception_ptr error);
  void end_if_done(std::uint64_t number, const Item& item);  // under the lock; `item` is gone if it was

  const int ranks_;
  const std::size_t segment_bytes_;
  std::mutex mutex_;  // of all that follows
  std::condition_variable changed_, ended_changed_;
  Scheduler scheduler_;
  Agreement agreement_;
  std::map<std::uint64_t, Item> items_;
  std::vector<Ended> ended_;
  Moved moved_;
  std::int64_t last_end_ns_ = 0;
  double s_per_byte_;
  bool is_closed_ = false, is_over_ = false;
};

}  // namespace pycomm::overlap
