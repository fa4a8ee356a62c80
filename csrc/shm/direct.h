// Messages that are read where they lie, in the memory of who sends them. For the files of collectives.
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
#pragma once

#include "trial.h"

namespace pycomm::shm {

template <class Read>
bool Group::read_by_all(const char* verb, Read read) {
  if (!read()) store_relaxed(ping(rank_).refused, seq_);
  sync(verb);
  for (int r = 0; r < ranks_; ++r) is_refused_ |= load_relaxed(ping(r).refused) == seq_;
  return !is_refused_;
}

template <class Read, class Stage>
void Group::move_directly(const Call& call, std::optional<bool>& way, std::size_t bytes, Read read, Stage stage) {
  const char* const verb = verb_name(call.verb);
  if (!read_by_all(verb, read)) return stage();
  if (way.has_value()) return account(bytes, verb);
  const auto stage_too = [&] { return stage(), true; };
  way = is_faster(verb, stage_too, [&] { return read_by_all(verb, read); });
  if (!way.has_value()) stage();
}

}  // namespace pycomm::shm
