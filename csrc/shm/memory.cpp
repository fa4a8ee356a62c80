#include "memory.h"

#include <sys/random.h>
#include <sys/uio.h>

#include "wait.h"

namespace pycomm::shm {
namespace {

const std::uint64_t& witness() {
  static const std::uint64_t value = [] {
    std::uint64_t random = 0;
    if (getrandom(&random, sizeof random, 0) != sizeof random) random = static_cast<std::uint64_t>(monotonic_ns());
    return random;
  }();
  return value;
}

}  // namespace

Source source_of(const void* data) {
  return {reinterpret_cast<std::uint64_t>(data), reinterpret_cast<std::uint64_t>(&witness()), witness()};
}

bool read_memory(int pid, const Source& source, std::size_t offset, void* to, std::size_t bytes) {
  std::uint64_t seen = 0;
  const struct iovec local[] = {{to, bytes}, {&seen, sizeof seen}};
  const struct iovec remote[] = {{reinterpret_cast<void*>(source.address + offset), bytes},
                                 {reinterpret_cast<void*>(source.witness_address), sizeof seen}};
  const ssize_t read = process_vm_readv(pid, local, 2, remote, 2, 0);
  return read == static_cast<ssize_t>(bytes + sizeof seen) && seen == source.witness;
}

}  // namespace pycomm::shm
