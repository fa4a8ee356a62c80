// What a stream moves next: urgent before large, in an order that is the same on every rank by construction.
//
// [Note: one order]
// Ranks submit the same items in the same order, but not at the same time. If each took what is most urgent among what
// *it* has, one would start an all_reduce that another has not heard of, while that one starts another: a deadlock. So
// before each grant the ranks agree on a number: how many items all of them have submitted (the least of their counts,
// agreement.h). The items up to that number, and how far each has come, are the same everywhere, so the choice is a pure
// function of them. The agreement is a microsecond over shared memory and a round trip between hosts, against segments of
// megabytes.
//
// [Note: credit]
// A grant is what the wire moves in kGrantS at the bandwidth that was measured (the ranks agree on the least of theirs, in
// the same exchange), and a segment at least. So there are few agreements where the wire is fast, and an urgent item waits
// for no more than a grant where it is slow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pycomm::overlap {

inline constexpr double kGrantS = 5e-3;

// One segment of the item of that number; items count from 1, segments from 0.
struct Granted {
  std::uint64_t number;
  std::size_t segment;
};

// The items of a stream that are not granted to the end. Not thread-safe; the stream has a lock.
class Scheduler {
 public:
  // Takes the next item of this rank, of at least one segment, each of about `segment_bytes`; returns its number. A higher
  // priority is more urgent.
  std::uint64_t add(std::int64_t priority, std::size_t segments, std::size_t segment_bytes);
  // What to move next, at least one segment, of the first `agreed` items: the most urgent first, and the oldest of those.
  // Whoever calls moves them all. The same on every rank for the same arguments.
  std::vector<Granted> grant(std::uint64_t agreed, double bytes_per_s);
  // Forgets an item of which nothing was granted.
  void drop(std::uint64_t number);
  void give_up() { items_.clear(); }

  std::uint64_t submitted() const { return submitted_; }
  bool has_work() const { return !items_.empty(); }

 private:
  struct Item {
    std::uint64_t number;
    std::int64_t priority;
    std::size_t segments, segment_bytes;
    std::size_t granted = 0;
    bool is_done() const { return granted == segments; }
  };

  std::vector<Item> items_;  // the oldest first
  std::uint64_t submitted_ = 0;
};

}  // namespace pycomm::overlap
