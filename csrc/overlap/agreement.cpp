#include "agreement.h"

#include <algorithm>

namespace pycomm::overlap {
namespace {

// The finalizer of MurmurHash3: every bit of the input changes half of those of the output.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 33) * 0xff51afd7ed558ccd;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53;
  return x ^ x >> 33;
}

}  // namespace

void Agreement::add(std::uint64_t digest) {
  last_ = mix(last_ * 31 + digest);
  frame_.digests[++frame_.submitted % kRemembered] = last_;
}

const Frame& Agreement::frame(double bytes_per_s) {
  frame_.bytes_per_s = bytes_per_s;
  return frame_;
}

Agreed Agreement::compare(const Frame* frames, std::size_t ranks) {
  Agreed agreed{frames[0].submitted, 0, frames[0].bytes_per_s};
  std::uint64_t most = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    agreed.submitted = std::min(agreed.submitted, frames[r].submitted);
    agreed.bytes_per_s = std::min(agreed.bytes_per_s, frames[r].bytes_per_s);
    most = std::max(most, frames[r].submitted);
  }
  const std::size_t at = agreed.submitted % kRemembered;
  const bool are_same = std::all_of(frames, frames + ranks, [&](const Frame& each) { return each.digests[at] == frames[0].digests[at]; });
  if (most - agreed.submitted < kRemembered) {
    if (are_same) compared_ = agreed.submitted;
    else agreed.bytes_per_s = 0;
  }
  agreed.compared = compared_;
  return agreed;
}

}  // namespace pycomm::overlap
