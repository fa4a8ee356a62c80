// How a group's long messages cross: it tries that once, again when its cores have moved, and now and then.
#include "windows.h"

#include <new>
#include <string>
#include <vector>

#include "trial.h"

namespace pycomm::shm {
namespace {

constexpr std::size_t kTriedFrom = 8u << 10, kTriedTo = 1u << 20;
constexpr std::size_t kTimed = 64u << 10;  // what is shorter cannot be timed, so several of it are
constexpr double kClearly = 0.9;  // short messages lose a third by a wrong choice, and something else may have had a core during the trial
constexpr double kByStrings = 0.95;  // which lose less
constexpr std::size_t kStringsFrom = 32u << 10;  // of what is exchanged: steps of shorter messages hardly hold one

template <class Run>
auto repeated(std::size_t tried, Run run) {
  return [tried, run] {
    for (std::size_t bytes = 0; bytes < kTimed; bytes += tried) run();
  };
}

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

template <class Run>
auto Group::by(Stores stores, Run run) {
  return [this, stores, run] {
    const Staging staging{*this, stores};
    return run(), true;
  };
}

template <class Run>
Stores Group::fastest_stores(const char* verb, bool may_be_strings, Run run) {
  const Stores best = *is_faster(verb, by(Stores::kPlain, run), by(Stores::kStreamed, run), kClearly) ? Stores::kStreamed : Stores::kPlain;
  if (!may_be_strings) return best;
  return *is_faster(verb, by(best, run), by(Stores::kStrings, run), kByStrings) ? Stores::kStrings : best;
}

// Regions and rings, each by the stores that suit it.
void Group::try_exchange(const Call& call, std::size_t bytes) {
  const std::size_t tried = std::clamp(bytes, kTriedFrom, kTriedTo);  // of that class of lengths
  const std::vector<unsigned char> sent = memory_to_try(tried);
  std::vector<unsigned char> received = memory_to_try(tried);
  const Load load{tried, 1, /*has_met=*/true};
  const auto fill = [&](auto part, std::size_t offset, std::size_t length) { put(part(rank_, 0), sent.data() + offset, length); };
  const auto use = [&](auto part, std::size_t offset, std::size_t length) { keep(received.data() + offset, part(1 - rank_, 0), length, /*is_streamed=*/false); };
  const auto by_rings = repeated(tried, [&] { in_rings(call, load, fill, use); });
  const auto by_swaps = repeated(tried, [&] { in_swaps(call, load, fill, use); });
  const char* const verb = verb_name(call.verb);
  walk_ring(verb, std::max(tried, kTimed), by_rings);
  const bool may_be_strings = bytes >= kStringsFrom && bytes < kStringsInUseFrom;
  const Stores rings_by = fastest_stores(verb, may_be_strings, by_rings), swaps_by = fastest_stores(verb, may_be_strings, by_swaps);
  chosen_.rings_by.of(bytes) = rings_by;
  chosen_.swaps_by.of(bytes) = swaps_by;
  chosen_.swaps.of(bytes) = !*is_faster(verb, by(swaps_by, by_swaps), by(rings_by, by_rings), kClearly);
}

void Group::try_one_way(const Call& call, std::size_t bytes) {
  const std::size_t tried = is_long(bytes) ? kLongFrom : std::clamp(bytes, kTriedFrom, kTriedTo);
  std::vector<unsigned char> data = memory_to_try(tried);  // sent, or received
  Result result(is_long(tried) && memory_prefers_streams());
  const Load load{tried, 1, /*has_met=*/true, is_long(tried), &result};
  const auto send = [&](const Call& way) {
    const bool reads = reads_windows(way);
    const auto fill = [&](auto part, std::size_t offset, std::size_t length) {
      if (!reads) put(part(rank_, 0), data.data() + offset, length, load.is_long);
    };
    const auto use = [&](auto part, std::size_t offset, std::size_t length) {
      if (reads) keep(data.data() + offset, part(rank_ == way.root ? (rank_ + 1) % ranks_ : way.root, 0), length, result.is_streamed());
    };
    in_rings(way, load, fill, use);
  };
  const auto by_rings = repeated(tried, [&] { send(call); });
  const char* const verb = verb_name(call.verb);
  walk_ring(verb, std::max(tried, kTimed), by_rings);
  const Stores best = fastest_stores(verb, /*may_be_strings=*/bytes < kStringsInUseFrom, by_rings);
  chosen_.one_way_by.of(bytes) = best;
  if (ranks_ > 2) return;
  Call back = call;
  back.root = 1 - call.root;
  const auto to_and_fro = repeated(2 * tried, [&] { send(call), send(back); });
  const auto going = [&](bool goes_back) {
    return by(best, [this, goes_back, to_and_fro] { goes_back_ = goes_back, to_and_fro(); });
  };
  chosen_.goes_back.of(bytes) = *is_faster(verb, going(false), going(true));
}

}  // namespace pycomm::shm
