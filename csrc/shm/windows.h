// How long messages cross, window by window, to and from the callers' buffers. For the files of collectives.
//
// [Note: strings in use]
// Whether two ranks better exchange what is long by strings depends on more than where their cores are. What strings copy from memory does not stay in the
// caches, where who adds it up looks for it again: an all_reduce of 1 MiB takes 77 us by them on Zen 5, and 42 by plain stores. But a reduce_scatter of
// 4 MiB, which adds up the half that it does not send, takes 260, and 331. No trial beforehand knows that. So from 512 KiB on the calls of each verb
// find it out themselves, as results do ([Note: results past the caches]), and try each way for twice as long as those: so that neither changes while the
// other is timed. The ranks need not agree.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "../kernels/reduce.h"
#include "group.h"
#include "rings.h"
#include "stores.h"
#include "swaps.h"

namespace pycomm::shm {

inline unsigned char* bytes_of(void* data) { return static_cast<unsigned char*>(data); }
inline const unsigned char* bytes_of(const void* data) { return static_cast<const unsigned char*>(data); }

inline constexpr std::size_t kStringsInUseFrom = 512u << 10;
inline constexpr unsigned kStringsInUse = 2 * Results::kTriedAtATime;
static_assert(kStringsInUseFrom / kLeastPieces >= std::max(kString, kLeastPiece));  // pieces are of one length either way

// Copies to or from a caller's buffer, which has no address where it has no elements; memcpy must not see that.
inline void copy(void* to, const void* from, std::size_t bytes, bool is_streamed = false) {
  if (bytes > 0) copy_by(is_streamed, to, from, bytes);
}

// Stores by these what the ranks stage and keep until it ends.
struct Group::Staging {
  Staging(Group& group, Stores stores) : group(group), stores_before(std::exchange(group.stores_, stores)) {}
  ~Staging() { group.stores_ = stores_before; }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  Group& group;
  const Stores stores_before;
};

template <class Fill, class Use>
void Group::in_windows(const Call& call, Load load, Fill fill, Use use) {
  if (load.total == 0) return;
  const bool goes_one_way = has_root(call.verb) && !take_turns();
  const bool tries_exchange = may_swap(call.verb) && !chosen_.swaps.of(load.total).has_value();
  const bool tries_one_way = goes_one_way && !chosen_.one_way_by.of(load.total).has_value();
  if (tries_exchange || tries_one_way) {
    if (call.step == Step::kStart) return;
    publish_in_windows(call, load);
    meet_in_windows(call, load);
    load.has_met = true;
    if (tries_exchange) try_exchange(call, load.total);
    else try_one_way(call, load.total);
    measure_soon();
  }
  const bool swaps = may_swap(call.verb) && *chosen_.swaps.of(load.total);
  const auto& chosen_by = swaps ? chosen_.swaps_by : goes_one_way ? chosen_.one_way_by : chosen_.rings_by;
  goes_back_ = goes_one_way && chosen_.goes_back.of(load.total).value_or(false);
  const bool may_be_strings = (may_swap(call.verb) || goes_one_way) && call.step == Step::kWhole && load.total >= kStringsInUseFrom;
  auto& ways = sending_ways_[static_cast<std::size_t>(call.verb)];
  Attempt<2> sending = may_be_strings ? Attempt<2>(ways.of(load.total), load.total, kStringsInUse) : Attempt<2>();
  load.sending = &sending;
  const Staging staging{*this, sending.way() != 0 ? Stores::kStrings : chosen_by.of(load.total).value_or(stores_)};
  swaps ? in_swaps(call, load, fill, use) : in_rings(call, load, fill, use);
  if (call.step != Step::kStart) account(load.total, verb_name(call.verb));
}

}  // namespace pycomm::shm
