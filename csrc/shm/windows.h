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

inline constexpr std::size_t kKeptAtOnce = 4 * kBlock;  // shorter copies are over before the lines that they write have come

// Copies what others have staged to where only its owner reads it.
inline void keep(void* to, const void* from, std::size_t bytes, bool is_streamed = false) {
  if (is_streamed) return copy_streamed(to, from, bytes);
  if (bytes > kKeptAtOnce) return keep_by_blocks(to, from, bytes);
  ask_to_write(to, bytes);
  copy(to, from, bytes);
}

// Stores by that way what the ranks stage until it ends.
struct Group::Staging {
  Staging(Group& group, bool streams) : group(group), streamed_before(std::exchange(group.streams_, streams)) {}
  ~Staging() { group.streams_ = streamed_before; }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  Group& group;
  const bool streamed_before;
};

template <class Fill, class Use>
void Group::in_windows(const Call& call, Load load, Fill fill, Use use) {
  if (load.total == 0) return;
  const bool goes_one_way = has_root(call.verb) && is_long(load.total) && !take_turns();
  const bool tries_exchange = may_swap(call.verb) && !chosen_.swaps.of(load.total).has_value();
  const bool tries_one_way = goes_one_way && !chosen_.one_way_streamed.has_value();
  if (tries_exchange || tries_one_way) {
    publish_in_windows(call, load);
    meet_in_windows(call, load);
    load.has_met = true;
    if (tries_exchange) try_exchange(call, load.total);
    else try_one_way(call);
  }
  if (may_swap(call.verb) && *chosen_.swaps.of(load.total)) {
    const Staging staging{*this, chosen_.swaps_streamed.of(load.total).value_or(streams_)};
    in_swaps(call, load, fill, use);
  } else {
    const Staging staging{*this, goes_one_way ? *chosen_.one_way_streamed : streams_};
    in_rings(call, load, fill, use);
  }
  account(load.total, verb_name(call.verb));
}

}  // namespace pycomm::shm
