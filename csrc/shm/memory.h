// Reading the memory of another process of this host.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycomm::shm {

// Where in a process others may read what it sends, and a number there that only this process knows, by which they tell
// it from a later one of its pid.
struct Source {
  std::uint64_t address, witness_address, witness;
};

Source source_of(const void* data);

// Copies what lies `offset` bytes behind the source (process_vm_readv). False if the kernel forbids it, has no pages there, or the
// process is another one: then `to` may hold anything.
bool read_memory(int pid, const Source& source, std::size_t offset, void* to, std::size_t bytes);

}  // namespace pycomm::shm
