// How long messages cross: window by window through the rings of the ranks; [Note: the ring] in group.h.
#pragma once

#include <algorithm>

#include "group.h"
#include "stores.h"

namespace pycomm::shm {

inline constexpr std::size_t kPieces = 8, kRootedPieces = 16, kLongPieces = 2, kLongRootedPieces = 4;  // to a window, where every rank has a core
inline constexpr std::size_t kMostStarted = 32;  // windows of a call that is started
inline constexpr std::size_t kLeastPiece = 2048, kLeastPieces = 8;  // a short message from one root: it is read while the rest is written

// Who reads nothing only has to leave the others the time to read; [Note: the ring].
inline bool Group::reads_windows(const Call& call) const {
  return !has_root(call.verb) || (rank_ == call.root) == (call.verb == Verb::kReduce || call.verb == Verb::kGather);
}

template <class Fill, class Use>
void Group::in_rings(const Call& call, const Load& load, Fill fill, Use use) {
  const char* const verb = verb_name(call.verb);
  // From one root to the others, or to it, small pieces, so that the root is soon read, or soon reads; where a piece costs switches
  // between ranks that share a core, or its results leave the caches and a fence waits for that, large ones.
  const std::size_t pieces = take_turns()          ? 1
                             : has_root(call.verb) ? load.is_long ? kLongRootedPieces : kRootedPieces
                                                   : load.is_long ? kLongPieces : kPieces;
  std::size_t piece = at_.window_bytes / pieces / load.parts / kLine * kLine;
  if (!take_turns() && has_root(call.verb)) piece = std::min(piece, std::max(stores_ == Stores::kStrings ? kString : kLeastPiece, load.total / kLeastPieces / kLine * kLine));
  piece = even_piece(load.total, piece);
  const bool reads = reads_windows(call);
  // A fence after each block would cost more than it gains; and with one root a rank only fills, or only reads, and does nothing by turns.
  const bool is_whole_piece = stores_ == Stores::kStreamed || load.is_streamed() || has_root(call.verb);
  const std::size_t block = is_whole_piece ? piece : stores_ == Stores::kStrings ? kString : kBlock;
  const std::uint64_t ahead = reads ? 0 : pieces - 1;
  const bool is_common = ranks_ == 2 && has_root(call.verb) && !take_turns();  // [Note: the common ring]
  Ring& ring = is_common ? common_ : own_;
  struct Window {
    std::size_t offset, bytes, stride, place;
  };
  const auto take_window = [&](std::size_t offset) {
    const std::size_t bytes = std::min(piece, load.total - offset), stride = round_up(bytes, kLine);
    return Window{offset, bytes, stride, ring.take(load.parts * stride)};
  };
  const auto apply = [&](auto& function, const Window& window, std::size_t at) {
    if (at >= window.bytes) return;
    const auto part = [&](int rank, std::size_t i) { return staged(is_common ? ranks_ : rank, window.place + i * window.stride + at); };
    function(part, window.offset + at, std::min(block, window.bytes - at));
  };
  // Who starts a call fills all of its windows, if they take no more than a large one may, as which the others then count.
  if (call.step == Step::kStart && (load.parts * round_up(load.total, kLine) > at_.window_bytes || load.total > kMostStarted * piece)) return;
  populate(ring);
  const Ring before = ring;
  if (is_common) ring.begin(reads ? 1 - rank_ : rank_, goes_back_);
  if (call.step == Step::kStart) {
    for (std::size_t offset = 0, i = 0; offset < load.total; offset += piece, ++i) {
      const Window window = take_window(offset);
      for (std::size_t at = 0; at < window.bytes; at += block) apply(fill, window, at);
      if (i == 0) publish_in_windows(call, load);
      publish_window(window_ + i);
    }
    ring = before;  // their places are taken when the call ends
    return;
  }
  const bool is_whole = call.step == Step::kWhole;
  Window now = take_window(0);
  if (is_whole) {
    for (std::size_t at = 0; at < now.bytes; at += block) apply(fill, now, at);
    publish_in_windows(call, load);
  }
  bool has_come = meet_in_windows(call, load);
  if (!has_come && is_whole) publish_window(window_);
  bool is_last = false;
  for (std::uint64_t i = 0; !is_last; ++i, ++window_) {
    if (!has_come && i >= ahead) await_windows(verb, ahead);
    has_come = false;
    is_last = now.offset + now.bytes == load.total;
    const Window next = is_last ? Window{} : take_window(now.offset + now.bytes);
    for (std::size_t at = 0; at < now.bytes; at += block) {  // [Note: by turns]
      if (is_whole) apply(fill, next, at);
      apply(use, now, at);
    }
    if (!is_last && is_whole) publish_window(window_ + 1);
    now = next;
  }
}

}  // namespace pycomm::shm
