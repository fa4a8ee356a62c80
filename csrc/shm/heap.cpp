#include "heap.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "errors.h"

namespace pycomm::shm {

Heaps::Heaps(int fd, int host_ranks, int host_rank)
    : fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)), host_ranks_(host_ranks), host_rank_(host_rank), directory_(fd, 0, kPage), heaps_(host_ranks) {
  directory_.populate(0, kPage, false);
  if (fd_ < 0) throw Broken("shared memory: no file descriptor left for the shared heap (check `ulimit -n`)");
}

Heaps::~Heaps() { ::close(fd_); }

std::uint64_t Heaps::take_area() {
  auto& taken = *reinterpret_cast<std::uint64_t*>(directory_.data());  // area 0 is the world's, so the first one given is 1
  return __atomic_add_fetch(&taken, 1, __ATOMIC_RELAXED);
}

Mapping& Heaps::heap(int host_rank) {
  auto& heap = heaps_[host_rank];
  if (!heap) heap = std::make_unique<Mapping>(fd_, FileLayout::of(host_ranks_).heaps + static_cast<std::size_t>(host_rank) * kHeapBytes, kHeapBytes);
  return *heap;
}

void* Heaps::allocate(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Mapping& own = heap(host_rank_);
  own_ = own.data();
  // Large buffers start on a huge page of their own.
  const std::size_t unit = bytes >= kHugePage / 2 ? kHugePage : kLine;
  const std::size_t need = round_up(std::max<std::size_t>(bytes, 1), unit);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [start, length] = *it;
    const std::size_t at = round_up(start, unit);
    if (at + need > start + length) continue;
    free_.erase(it);
    if (at > start) free_[start] = at - start;
    if (at + need < start + length) free_[at + need] = start + length - at - need;
    used_[at] = need;
    return own.data() + at;
  }
  // Nothing fits: grow. What the alignment skips is kept for small buffers.
  const std::size_t at = round_up(populated_, unit);
  const std::size_t end = round_up(at + need, kHugePage);
  if (end > kHeapBytes) throw Broken("shared heap: full; free shared tensors that are not needed");
  own.populate(populated_, end - populated_, true);
  if (at > populated_) free_[populated_] = at - populated_;
  if (end > at + need) free_[at + need] = end - at - need;
  populated_ = end;
  used_[at] = need;
  return own.data() + at;
}

void Heaps::free(void* data) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto used = used_.find(static_cast<std::size_t>(static_cast<unsigned char*>(data) - own_));
  if (used == used_.end()) return;
  auto [start, length] = *used;
  used_.erase(used);
  if (length == 0) return;
  const auto next = free_.lower_bound(start);
  if (next != free_.end() && next->first == start + length) {
    length += next->second;
    free_.erase(next);
  }
  const auto after = free_.lower_bound(start);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == start) {
      before->second += length;
      return;
    }
  }
  free_[start] = length;
}

void Heaps::retire(const void* data) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto after = used_.upper_bound(static_cast<std::size_t>(static_cast<const unsigned char*>(data) - own_));
  if (after != used_.begin()) std::prev(after)->second = 0;
}

unsigned char* Heaps::address(int host_rank, Place place, std::size_t bytes) {
  const std::size_t offset = place - 1;
  if (place == 0 || offset >= kHeapBytes || bytes > kHeapBytes - offset)
    throw Broken("shared heap: rank " + std::to_string(host_rank) + " named a place outside its heap");
  return heap(host_rank).data() + offset;
}

}  // namespace pycomm::shm
