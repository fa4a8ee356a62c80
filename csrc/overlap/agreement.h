// What the ranks of a stream tell one another before each grant.
//
// [Note: compared once]
// The frame of a rank says how many items it has submitted, the bandwidth that it measures, and a digest of each item that
// the ranks have not agreed on yet. So the exchange that orders them (scheduler.h) also compares them. One that is the same
// on all ranks needs no comparison of its own, which over gloo is an exchange beside every segment. One that differs is
// refused on all of them before anything of it moves: single segments could fit, those of another item too, and ranks that
// cut it differently would come to differ in whose turn it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace pycomm::overlap {

inline constexpr std::size_t kWindow = 64;  // items to agree on in one exchange; the rest waits for the next one

struct Frame {
  std::uint64_t submitted = 0;  // at most kWindow more than were agreed on
  double bytes_per_s = 0;
  std::uint64_t digests[kWindow] = {};  // of item i, if it was not agreed on, at i % kWindow
};

// The first `submitted` items are there on all ranks. The same on all ranks, as is what follows from it.
struct Agreed {
  std::uint64_t submitted = 0;
  double bytes_per_s = 0;
  std::vector<std::uint64_t> refused;  // the numbers of those, since the last exchange, that are not the same on all
};

// The frames of one stream. Not thread-safe; the stream has a lock.
class Agreement {
 public:
  // Takes the next item of this rank; `digest` stands for what has to be the same on all.
  void add(std::uint64_t digest) { digests_.push_back(digest); }
  // This rank's frame.
  Frame frame(double bytes_per_s) const;
  // What the frames of all ranks say, this one's among them.
  Agreed agree(const Frame* frames, std::size_t ranks);

 private:
  std::uint64_t agreed_ = 0;
  std::deque<std::uint64_t> digests_;  // of the items that follow
};

}  // namespace pycomm::overlap
