// How two ranks exchange long messages: round by round through two regions that they swap.
//
// [Note: swapped regions]
// A line of a ring goes to the other core twice in its life: to be read there, and when its owner takes it back to write the next
// message. Where two ranks send each other as much, one trip is enough: each fills one of two regions, then takes what
// the other has filled and puts its own next bytes into the very lines that it has just read. In the next round the regions have
// changed hands.
//
// The first region is filled before a rank looks for the other one's, which its header tells of its first step and a counter of the rest.
// Later ones are filled by steps: what a rank has read of a step it fills again and publishes, so each is at most a region ahead, and waits for
// the step that lies where it reads. When a call ends, the region that a rank read last is its own: the other has filled it and left it. So
// the next call fills it without waiting, out of the cache.
//
// Two ranks on Sapphire Rapids take for an all_reduce in place, of buffers that their L3 holds, 0.8 of the time of the rings at
// 4 KiB, 0.77 at 256 KiB and 1 MiB, 0.86 at 64 MiB. On AMD's Zen 3 a line that another core holds dirty is slow to
// come, and rings that are longer than its L2 may be better; so a group tries both, for short and for long messages.
#pragma once

#include <algorithm>

#include "group.h"
#include "stores.h"

namespace pycomm::shm {

inline constexpr std::size_t kStep = 16u << 10;   // so much is filled before the other rank is told
inline constexpr std::size_t kTwoStepsFrom = 4u << 10;
inline constexpr std::size_t kMostSteps = kRegionBytes / kStep;  // of a region
// By turns the processor does not read ahead of what the other rank has filled: two ranks on Zen 5 take 0.95 of the time within one L3, and
// 0.75 between two.
inline constexpr std::size_t kWindowAhead = 2 * kBlock;
inline constexpr std::size_t kSlotTo = 64;  // a longer message is sooner in a region, of which the lines are there, than in a slot

// What is not long is two steps, or one if it is short: a rank fills the second while the first one's news is on its way (4 KiB: 0.93 of the time).
inline std::size_t step_of(std::size_t piece) {
  return piece < kTwoStepsFrom ? piece : std::min(round_up((piece + 1) / 2, kLine), kStep);
}

inline bool Group::is_short(Verb verb, std::size_t bytes) const {
  return bytes <= (may_swap(verb) && chosen_.swaps.of(bytes).value_or(true) ? kSlotTo : at_.short_bytes);
}

inline bool Group::may_swap(Verb verb) const { return ranks_ == 2 && !has_root(verb) && !take_turns(); }

template <class Fill, class Use>
void Group::in_swaps(const Call& call, const Load& load, Fill fill, Use use) {
  const char* const verb = verb_name(call.verb);
  const std::size_t piece = even_piece(load.total, kRegionBytes), stride = step_of(piece), steps = (piece + stride - 1) / stride;
  // By turns, [Note: by turns], where there is something to fill. A fence after each block would cost more than that gains; and a whole step
  // at once the processor reads further ahead by itself: 32 and 64 KiB take 0.85 of the time, 4 KiB 0.97.
  const bool by_turns = !load.is_streamed() && load.total > kRegionBytes;
  const std::size_t block = !by_turns ? stride : stores_ == Stores::kStrings ? kString : kBlock;
  const auto apply = [&](auto& function, unsigned char* window, std::size_t offset, std::size_t at, std::size_t end) {
    if (at >= end) return;
    const auto part = [&](int, std::size_t) { return window + at; };  // the only one, of the only other rank
    function(part, offset + at, std::min(block, end - at));
  };
  const auto fill_first = [&](std::size_t from, std::size_t to) {
    for (std::size_t at = from; at < to; at += block) apply(fill, region(round_), 0, at, std::min(to, load.total));
  };
  if (call.step == Step::kStart && load.total > piece) return;
  if (call.step != Step::kEnd) {
    use_region();
    fill_first(0, stride);
    publish_in_windows(call, load);
    fill_first(stride, piece);  // while the header is on its way
    if (steps > 1 || call.step == Step::kStart) publish_window(window_ + steps - 1);
  }
  if (call.step == Step::kStart) return;
  const bool has_come = meet_in_windows(call, load);  // the first step of every rank, with its header
  if (!has_come && steps == 1 && call.step == Step::kWhole) publish_window(window_);
  for (std::size_t offset = 0; offset < load.total; offset += piece, ++round_) {
    const std::size_t end = std::min(piece, load.total - offset), next_end = std::min(piece, load.total - offset - end);
    unsigned char* const window = region(round_ + 1);  // which the other rank has filled
    for (std::size_t step = 0; step < end; step += stride, ++window_) {
      if (!has_come || offset + step > 0) await_windows(verb);
      const std::size_t step_end = std::min(end, step + stride);
      const auto ask = [&](std::size_t from, std::size_t bytes) {
        if (from < step_end) ask_to_read(window + from, std::min(bytes, step_end - from));
      };
      ask(step, by_turns ? kWindowAhead : kBlock);  // it begins to read ahead only then
      for (std::size_t at = step; at < step_end; at += block) {
        if (by_turns) ask(at + kWindowAhead, block);
        apply(use, window, offset, at, step_end);
        apply(fill, window, offset + end, at, std::min(step_end, next_end));
      }
      if (step < next_end) publish_window(window_ + steps);
    }
  }
}

}  // namespace pycomm::shm
