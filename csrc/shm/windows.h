// How long messages cross: window by window through the rings, to and from the callers' buffers. For the files of collectives.
#pragma once

#include <algorithm>
#include <cstring>

#include "../kernels/reduce.h"
#include "group.h"
#include "stores.h"

namespace pycomm::shm {

inline constexpr std::size_t kPieces = 8, kRootedPieces = 16, kLongPieces = 2, kLongRootedPieces = 4;  // to a window, where every rank has a core
inline constexpr std::size_t kLeastPiece = 2048, kLeastPieces = 8;  // a short message from one root: it is read while the rest is written
inline constexpr std::size_t kLongFrom = 4u << 20;  // a result of so many bytes leaves the caches anyway

inline unsigned char* bytes_of(void* data) { return static_cast<unsigned char*>(data); }
inline const unsigned char* bytes_of(const void* data) { return static_cast<const unsigned char*>(data); }

// Copies to or from a caller's buffer, which has no address where it has no elements; memcpy must not see that.
inline void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memmove(to, from, bytes);
}

inline bool is_long(std::size_t bytes) { return bytes >= kLongFrom; }
// Whether a result of `bytes` is to be written past the caches. Each rank has tried that for itself, and need not agree.
inline bool streams_output(std::size_t bytes) { return is_long(bytes) && memory_prefers_streams(); }

// Copies what others have staged to where only its owner reads it.
inline void keep(void* to, const void* from, std::size_t bytes, bool is_streamed = false) {
  if (is_streamed) return copy_streamed(to, from, bytes);
  ask_to_write(to, bytes);
  copy(to, from, bytes);
}

template <class Fill, class Use>
void Group::in_windows(const Call& call, const Load& load, Fill fill, Use use) {
  if (load.total == 0) return;
  const char* const verb = verb_name(call.verb);
  // From one root to the others, or to it, small pieces, so that the root is soon read, or soon reads; where a piece costs switches
  // between ranks that share a core, or its results leave the caches and a fence waits for that, large ones.
  const std::size_t pieces = take_turns()          ? 1
                             : has_root(call.verb) ? load.is_long ? kLongRootedPieces : kRootedPieces
                                                   : load.is_long ? kLongPieces : kPieces;
  std::size_t piece = at_.window_bytes / pieces / load.parts / kLine * kLine;
  if (!take_turns() && has_root(call.verb)) piece = std::min(piece, std::max(kLeastPiece, load.total / kLeastPieces / kLine * kLine));
  // All alike: a last one of a few lines would cost as much waiting as the others.
  const std::size_t windows = (load.total + piece - 1) / piece;
  piece = round_up((load.total + windows - 1) / windows, kLine);
  const std::size_t block = streams_ || load.is_streamed ? piece : kBlock;  // a fence after each block would cost more than it gains
  // Who reads nothing only has to leave the others the time to read; [Note: the ring].
  const bool reads = !has_root(call.verb) || (rank_ == call.root) == (call.verb == Verb::kReduce || call.verb == Verb::kGather);
  const std::uint64_t ahead = reads ? 0 : pieces - 1;
  struct Window {
    std::size_t offset, bytes, stride, place;
  };
  const auto take_window = [&](std::size_t offset) {
    const std::size_t bytes = std::min(piece, load.total - offset), stride = round_up(bytes, kLine);
    return Window{offset, bytes, stride, take(load.parts * stride)};
  };
  const auto apply = [&](auto& function, const Window& window, std::size_t at) {
    if (at >= window.bytes) return;
    const auto part = [&](int rank, std::size_t i) { return staged(rank, window.place + i * window.stride + at); };
    function(part, window.offset + at, std::min(block, window.bytes - at));
  };
  use_ring();
  Window now = take_window(0);
  for (std::size_t at = 0; at < now.bytes; at += block) apply(fill, now, at);
  bool has_come = false;  // everybody's first window, with the header, if all ranks filled theirs before they met
  if (!load.has_met) {
    publish(call, Places{});  // none: the header still holds what an earlier call left there
    meet(call);
    has_come = count_shared() == 0;
  }
  if (!has_come) publish_window(window_);
  bool is_last = false;
  for (std::uint64_t i = 0; !is_last; ++i, ++window_) {
    if (!has_come && i >= ahead) await_windows(verb, ahead);
    has_come = false;
    is_last = now.offset + now.bytes == load.total;
    const Window next = is_last ? Window{} : take_window(now.offset + now.bytes);
    for (std::size_t at = 0; at < now.bytes; at += block) {  // [Note: by turns]
      apply(fill, next, at);
      apply(use, now, at);
    }
    if (!is_last) publish_window(window_ + 1);
    now = next;
  }
  account(load.total, verb);
}

}  // namespace pycomm::shm
