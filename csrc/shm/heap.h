// Buffers that every rank of the host can reach: the memory behind pycomm.empty(..., shared=True).
//
// Each rank allocates from its own heap, alone and without a message. Where a buffer lies is told in the header of the
// collective that uses it; the others map a heap when they first hear of it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "layout.h"
#include "mapping.h"

namespace pycomm::shm {

// A place in a heap: 0 is "not in a heap", else 1 + offset.
using Place = std::uint64_t;

class Heaps {
 public:
  Heaps(int fd, int host_ranks, int host_rank);
  ~Heaps();
  Heaps(const Heaps&) = delete;
  Heaps& operator=(const Heaps&) = delete;

  // Memory of this rank's heap, 64-byte aligned, from 1 MiB on of huge pages. Contents are whatever was there. Throws Broken.
  void* allocate(std::size_t bytes);
  void free(void* data);
  // The memory of the block that `data` lies in is not used again when it is freed.
  void retire(const void* data);

  // An area that no group of this host has had.
  std::uint64_t take_area();

  // The place of [data, data + bytes), if it lies in this rank's heap.
  Place place(const void* data, std::size_t bytes) const {
    const auto offset = static_cast<std::size_t>(static_cast<const unsigned char*>(data) - own_);
    return own_ != nullptr && offset < kHeapBytes && bytes <= kHeapBytes - offset ? 1 + offset : 0;
  }
  // That place in rank `host_rank`'s heap, in this process's address space. Throws Broken if it lies outside.
  unsigned char* address(int host_rank, Place place, std::size_t bytes);

 private:
  Mapping& heap(int host_rank);

  int fd_, host_ranks_, host_rank_;
  Mapping directory_;
  unsigned char* own_ = nullptr;
  std::vector<std::unique_ptr<Mapping>> heaps_;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // offset -> bytes, never two neighbours
  std::map<std::size_t, std::size_t> used_;  // 0 bytes: retired
  std::size_t populated_ = 0;                // everything below exists
};

}  // namespace pycomm::shm
