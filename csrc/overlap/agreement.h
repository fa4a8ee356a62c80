// What the ranks of a stream tell one another before each grant.
//
// [Note: compared once]
// The frame of a rank says how many items it has submitted, the bandwidth that it measures, and a digest of its items up
// to each of the last few. So the exchange that orders them (scheduler.h) also compares them: where the ranks' digests are
// the same at the number that all have reached, their collectives need no comparison of their own, which over gloo is an
// exchange beside every segment. Where they differ, or cannot be compared any more because a rank is too far ahead, each
// collective compares what it calls, as it does without a stream, and raises what is wrong.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycomm::overlap {

inline constexpr std::size_t kRemembered = 64;  // items that a rank may be ahead of another

struct Frame {
  std::uint64_t submitted = 0;
  double bytes_per_s = 0;
  std::uint64_t digests[kRemembered] = {};  // of this rank's items up to number i, at i % kRemembered
};

// The first `submitted` items are there on all ranks, the first `compared` the same on all of them. `bytes_per_s` is 0 where the
// ranks' items are known to differ: they would grant different numbers of them, and some move what others do not.
struct Agreed {
  std::uint64_t submitted = 0, compared = 0;
  double bytes_per_s = 0;
};

// The frames of one stream. Not thread-safe; the stream has a lock.
class Agreement {
 public:
  // Takes the next item of this rank; `digest` stands for what has to be the same on all.
  void add(std::uint64_t digest);
  // This rank's frame.
  const Frame& frame(double bytes_per_s);
  // What the frames of all ranks say.
  Agreed compare(const Frame* frames, std::size_t ranks);

 private:
  Frame frame_;
  std::uint64_t last_ = 0, compared_ = 0;
};

}  // namespace pycomm::overlap
