// Whether two ranks swap regions: they try it once, and again when their cores have moved.
#include "trial.h"
#include "windows.h"

namespace pycomm::shm {
namespace {

constexpr std::size_t kTriedBytes = 256u << 10;
constexpr double kClearly = 0.9;  // short messages lose a third by a wrong choice, and something else may have had a core during the trial

}  // namespace

void Group::try_swaps(const Call& call) {
  const std::vector<unsigned char> sent(kTriedBytes);
  std::vector<unsigned char> received(kTriedBytes);
  const Load load{kTriedBytes, 1, /*has_met=*/true};
  const auto fill = [&](auto part, std::size_t offset, std::size_t length) { put(part(rank_, 0), sent.data() + offset, length); };
  const auto use = [&](auto part, std::size_t offset, std::size_t length) { copy(received.data() + offset, part(1 - rank_, 0), length); };
  const auto by_rings = [&] { return in_rings(call, load, fill, use), true; };
  walk_ring(verb_name(call.verb), kTriedBytes, by_rings);
  chosen_.swaps = !*is_faster(verb_name(call.verb), [&] { return in_swaps(call, load, fill, use), true; }, by_rings, kClearly);
}

}  // namespace pycomm::shm
