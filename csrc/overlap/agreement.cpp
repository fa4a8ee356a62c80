#include "agreement.h"

#include <algorithm>

namespace pycomm::overlap {

Frame Agreement::frame(double bytes_per_s) const {
  Frame mine{agreed_, bytes_per_s};
  for (const std::uint64_t digest : digests_) {
    if (mine.submitted == agreed_ + kWindow) break;
    mine.digests[++mine.submitted % kWindow] = digest;
  }
  return mine;
}

Agreed Agreement::agree(const Frame* frames, std::size_t ranks) {
  Agreed agreed{frames[0].submitted, frames[0].bytes_per_s, {}};
  for (std::size_t r = 1; r < ranks; ++r) {
    agreed.submitted = std::min(agreed.submitted, frames[r].submitted);
    agreed.bytes_per_s = std::min(agreed.bytes_per_s, frames[r].bytes_per_s);
  }
  while (agreed_ < agreed.submitted) {
    const std::size_t at = ++agreed_ % kWindow;
    digests_.pop_front();
    const auto is_as_first = [&](const Frame& each) { return each.digests[at] == frames[0].digests[at]; };
    if (!std::all_of(frames, frames + ranks, is_as_first)) agreed.refused.push_back(agreed_);
  }
  return agreed;
}

}  // namespace pycomm::overlap
