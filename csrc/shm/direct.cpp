// How a rank reads and writes the memory of another one; [Note: direct reads] and [Note: direct writes].
#include "direct.h"

#include <sched.h>
#include <sys/uio.h>

#include "await.h"
#include "process.h"

namespace pycomm::shm {
namespace {

// What the word of a gate goes through for each write.
constexpr std::uint64_t opened(std::uint64_t write) { return 3 * write; }
constexpr std::uint64_t entered(std::uint64_t write) { return 3 * write + 1; }
constexpr std::uint64_t closed(std::uint64_t write) { return 3 * write + 2; }

}  // namespace

bool Group::write_memory(int gate, int rank, const Source& target, const void* from, std::size_t bytes, const char* verb) {
  std::uint64_t& word = ping(gate).gate;
  waiter_->until(word, opened(writes_), rank, take_turns() ? 0 : kSpinsAlone, deadline_, verb);
  if (!pass(word, opened(writes_), entered(writes_))) return false;  // it has left
  const struct iovec local{const_cast<void*>(from), bytes}, remote{reinterpret_cast<void*>(target.address), bytes};
  const bool could = !has_ended(setup_.pidfds[rank]) &&
                     process_vm_writev(setup_.pids[rank], &local, 1, &remote, 1, 0) == static_cast<ssize_t>(bytes);
  store_release(word, closed(writes_));
  return could;
}

void Group::open_gate(int gate) {
  store_release(ping(gate).gate, opened(writes_));
  waiter_->published();
}

void Group::close_gate(int gate, int writer) {
  std::uint64_t& word = ping(gate).gate;
  if (pass(word, opened(writes_), closed(writes_))) return;
  while (load_acquire(word) == entered(writes_) && !has_ended(setup_.pidfds[writer])) sched_yield();
}

void Group::tell_blocks(const Call& call, const void* const* blocks) {
  if (rank_ == call.root)
    for (int r = 0; r < ranks_; ++r) block_addresses(rank_)[r] = reinterpret_cast<std::uint64_t>(blocks[r]);
  publish(call, source_of(nullptr));
  meet(call);
}

Source Group::block_of(int root) const {
  Source source = told<Source>(root);
  source.address = block_addresses(root)[rank_];
  return source;
}

}  // namespace pycomm::shm
