// How a group's long messages cross: it tries that once, and again when its cores have moved.
#include "windows.h"

#include <new>
#include <string>
#include <vector>

#include "trial.h"

namespace pycomm::shm {
namespace {

constexpr std::size_t kTriedFrom = 64u << 10, kTriedTo = 1u << 20;  // by two ranks that send each other as much
constexpr double kClearly = 0.9;  // short messages lose a third by a wrong choice, and something else may have had a core during the trial

}  // namespace

std::vector<unsigned char> Group::memory_to_try(std::size_t bytes) {
  std::vector<unsigned char> memory;
  or_tell([&] {
    try {
      memory.resize(bytes);
    } catch (const std::bad_alloc&) {
      throw Broken("shared memory: there are no " + std::to_string(bytes) + " bytes to try out how long messages go");
    }
  });
  return memory;
}

// Between two L3s of Zen 5 regions are faster up to 256 KiB, by plain stores, and rings from 1 MiB on, by non-temporal ones.
void Group::try_exchange(const Call& call, std::size_t bytes) {
  const std::size_t tried = std::clamp(bytes, kTriedFrom, kTriedTo);  // of that class of lengths; what is shorter cannot be timed
  const std::vector<unsigned char> sent = memory_to_try(tried);
  std::vector<unsigned char> received = memory_to_try(tried);
  const Load load{tried, 1, /*has_met=*/true};
  const auto fill = [&](auto part, std::size_t offset, std::size_t length) { put(part(rank_, 0), sent.data() + offset, length); };
  const auto use = [&](auto part, std::size_t offset, std::size_t length) { copy(received.data() + offset, part(1 - rank_, 0), length); };
  const auto by_rings = [&] { return in_rings(call, load, fill, use), true; };
  const auto by_swaps = [&](bool streams) {
    const Staging staging{*this, streams};
    return in_swaps(call, load, fill, use), true;
  };
  const char* const verb = verb_name(call.verb);
  walk_ring(verb, tried, by_rings);
  // The few lines of measure_line()'s trial may go sooner by non-temporal stores where regions, which change hands anyway, do not.
  const bool streams = streams_ && *is_faster(verb, [&] { return by_swaps(false); }, [&] { return by_swaps(true); }, kClearly);
  chosen_.swaps_streamed.of(bytes) = streams;
  chosen_.swaps.of(bytes) = !*is_faster(verb, [&] { return by_swaps(streams); }, by_rings, kClearly);
}

void Group::try_one_way(const Call& call) {
  std::vector<unsigned char> data = memory_to_try(kLongFrom);  // sent, or received
  const Load load{kLongFrom, 1, /*has_met=*/true, /*is_long=*/true, memory_prefers_streams()};
  const bool reads = reads_windows(call);
  const auto fill = [&](auto part, std::size_t offset, std::size_t length) {
    if (!reads) put(part(rank_, 0), data.data() + offset, length, /*is_long=*/true);
  };
  const auto use = [&](auto part, std::size_t offset, std::size_t length) {
    if (reads) keep(data.data() + offset, part(rank_ == call.root ? (rank_ + 1) % ranks_ : call.root, 0), length, load.is_streamed);
  };
  const auto by_rings = [&](bool streams) {
    const Staging staging{*this, streams};
    return in_rings(call, load, fill, use), true;
  };
  chosen_.one_way_streamed = is_faster(verb_name(call.verb), [&] { return by_rings(false); }, [&] { return by_rings(true); }, kClearly);
}

}  // namespace pycomm::shm
