// Messages that are read where they lie, in the memory of who sends them, or written to where they go. For the files of collectives.
//
// [Note: direct reads]
// The kernel lets a process read the memory of another one of the same user (process_vm_readv): one copy, by who receives, instead
// of one by each, and nothing to wait for but the beginning and the end. It has to find and hold every page, so this pays
// from some ten KiB up, until two cores that copy are faster than one. Where that is depends on the machine, so the first call
// that may go this way moves its message several times, by both ways.
//
// The rank that is read must stay in the call until all have read. If it gives up, or is killed, its memory may hold anything: so who
// has read looks whether the group is broken before it says that it has (Group::sync), and reads a number that only that process
// knows along with the message, as its pid may be another's by then.
//
// Containers and kernel.yama.ptrace_scope may forbid it, and of some memory (a device's) the kernel has no pages. Who is refused
// says so at that second meeting; then all move this message through shared memory, and every later one.
//
// [Note: direct writes]
// Who is read has nothing to do. So it writes a share of a longer message into each reader's memory (process_vm_writev), while the reader
// fetches the rest: all copy as much. Where each rank sends to one root, it writes all of that: the root would read alone.
//
// What is read too late is thrown away; what is written too late destroys whatever the reader keeps there by then. So each rank has a
// gate between itself and the root, a word in shared memory that only goes on: the reader opens it, the sender enters, writes and closes
// it. A reader that leaves the call, whatever the reason, closes the gate itself, and if the sender is inside waits until it has come out
// or has died: some microseconds, unless somebody stopped it just there. Once inside, the sender looks at the reader's pidfd, for the
// sake of whoever else may have that pid by now.
#pragma once

#include "memory.h"
#include "trial.h"

namespace pycomm::shm {

// Where one rank's message to the others is copied once. On two ranks of Sapphire Rapids 16 KiB take 0.85 of the time, 64 KiB and 256 KiB
// 0.6, 1 MiB 0.6, 2 MiB 0.65, 4 MiB 1.05.
// Directly only if that takes clearly less: windows gain where the senders take turns, [Note: the common ring], and the trial has one alone.
inline constexpr double kDirectIfBelow = 0.9;
inline constexpr std::size_t kDeliverFrom = 12u << 10, kDeliverTo = 2u << 20;
// Of a gather's or scatter's blocks where ranks share cores: then another rank could run while one copies for the second time. On two cores
// of Zen 3 four ranks' calls, with each as the root in turn, take 0.85 of the time with blocks of 64 KiB, 0.55 to 0.8 with 128 KiB to 1 MiB;
// with one root, and a barrier before each, 1.2 to 1.3 with 64 KiB and 0.75 to 1.0 from 256 KiB on.
inline constexpr std::size_t kBlocksInTurnsFrom = 128u << 10;
inline constexpr double kBlocksInTurnsIfBelow = 1.0;

template <class Move>
bool Group::move_by_all(const char* verb, std::size_t bytes, Move move) {
  if (!move()) store_relaxed(ping(rank_).refused, seq_);
  // Others copy as much meanwhile, and must not be put to sleep: waking one takes longer than they do.
  sync(verb, kSpinsAlone + static_cast<int>(bytes / kBytesASpin));
  for (int r = 0; r < ranks_; ++r) is_refused_ |= load_relaxed(ping(r).refused) == seq_;
  return !is_refused_;
}

template <class Move, class Stage>
void Group::move_directly(const Call& call, Way& way, std::size_t bytes, Move move, Stage stage) {
  const char* const verb = verb_name(call.verb);
  const auto move_all = [&] { return move_by_all(verb, bytes, move); };
  if (!move_all()) return stage();
  if (way.has_value()) return account(bytes, verb);
  {
    const struct Keep {
      explicit Keep(bool& keeps) : keeps(keeps = true) {}
      ~Keep() { keeps = false; }
      bool& keeps;
    } kept(keeps_slots_);
    walk_ring(verb, bytes, stage);
    way = is_faster(verb, [&] { return stage(), true; }, move_all, take_turns() ? kBlocksInTurnsIfBelow : kDirectIfBelow);
  }
  measure_soon();
  if (!way.has_value()) stage();
}

inline bool Group::may_deliver(std::size_t bytes) {
  return bytes >= kDeliverFrom && bytes <= kDeliverTo && may_go_directly(chosen_.delivers_directly.of(bytes));
}

template <class Stage>
void Group::deliver(const Call& call, void* data, std::size_t bytes, std::size_t share, Stage stage) {
  publish(call, source_of(data));
  meet(call);
  const Gate gate{*this, rank_, call.root};
  const auto write_shares = [&] {
    bool could = true;
    for (int i = 1; i < ranks_ && share > 0 && could; ++i) {
      const int r = (rank_ + i) % ranks_;
      could = write_memory(/*gate=*/r, r, told<Source>(r), data, share, verb_name(call.verb));
    }
    return could;
  };
  const auto read_rest = [&] {
    if (share > 0) open_gate(rank_);
    return read_memory(setup_.pids[call.root], told<Source>(call.root), share, static_cast<unsigned char*>(data) + share, bytes - share);
  };
  move_directly(call, chosen_.delivers_directly.of(bytes), bytes, [&] {
    writes_ += share > 0;
    return rank_ == call.root ? write_shares() : read_rest();
  }, stage);
}

inline bool Group::may_move_blocks(Way way, std::size_t bytes) const {
  return bytes >= (take_turns() ? kBlocksInTurnsFrom : kDeliverFrom) && bytes <= kDeliverTo && may_go_directly(way, /*in_turns_too=*/true);
}

}  // namespace pycomm::shm
