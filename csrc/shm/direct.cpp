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

bool Group::write_memory(int rank, const Source& target, const void* from, std::size_t bytes, const char* verb) {
  std::uint64_t& gate = ping(rank).gate;
  waiter_->until(gate, opened(writes_), rank, kSpinsAlone, deadline_, verb);
  if (!pass(gate, opened(writes_), entered(writes_))) return false;  // it has left
  const struct iovec local{const_cast<void*>(from), bytes}, remote{reinterpret_cast<void*>(target.address), bytes};
  const bool could = !has_ended(setup_.pidfds[rank]) &&
                     process_vm_writev(setup_.pids[rank], &local, 1, &remote, 1, 0) == static_cast<ssize_t>(bytes);
  store_release(gate, closed(writes_));
  return could;
}

void Group::open_gate() {
  store_release(ping(rank_).gate, opened(writes_));
  waiter_->published();
}

void Group::close_gate(int writer) {
  std::uint64_t& gate = ping(rank_).gate;
  if (pass(gate, opened(writes_), closed(writes_))) return;
  while (load_acquire(gate) == entered(writes_) && !has_ended(setup_.pidfds[writer])) sched_yield();
}

}  // namespace pycomm::shm
