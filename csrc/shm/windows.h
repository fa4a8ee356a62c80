// How long messages cross, window by window, to and from the callers' buffers. For the files of collectives.
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
  const Staging staging{*this, chosen_by.of(load.total).value_or(stores_)};
  swaps ? in_swaps(call, load, fill, use) : in_rings(call, load, fill, use);
  if (call.step != Step::kStart) account(load.total, verb_name(call.verb));
}

}  // namespace pycomm::shm
