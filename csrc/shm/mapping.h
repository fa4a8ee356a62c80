// A piece of the job's memfd in this process's address space.
#pragma once

#include <fcntl.h>

#include <cstddef>

namespace pycomm::shm {

// What is mapped keeps its size: no peer can make another one's access a SIGBUS.
inline constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

class Mapping {
 public:
  // Maps `bytes` of `fd` from `offset` on. Nothing is allocated: touching a page that was not populated may end in SIGBUS.
  Mapping(int fd, std::size_t offset, std::size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  unsigned char* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

  // Allocates [offset, offset + bytes) and enters it in this process's page tables; throws Broken if the memory is not to
  // be had. `huge` asks for huge pages, which are worth 1.3 to 1.6 times the bandwidth from DRAM.
  void populate(std::size_t offset, std::size_t bytes, bool huge);
  // Gives [offset, offset + bytes) back to the system; the next one to populate it finds zeros.
  void release(std::size_t offset, std::size_t bytes);

 private:
  int fd_;
  std::size_t file_offset_;
  unsigned char* data_;
  std::size_t bytes_;
};

// Makes the memfd of a host with `ranks` ranks: sized, sealed, close-on-exec. Returns its descriptor.
int create_memory(int ranks);
// Throws Broken unless `fd` is a memfd made by create_memory(ranks): the size and the seals are checked before use.
void check_memory(int fd, int ranks);

}  // namespace pycomm::shm
