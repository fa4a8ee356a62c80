// Where the blocks of a rank's input or output lie, one for each rank.
#pragma once

#include <cstddef>

namespace pycomm::shm {

class Blocks {
 public:
  Blocks(const void* first, std::size_t apart) : first_(first), apart_(apart) {}  // from one to the next, in bytes
  explicit Blocks(const void* const* each) : each_(each) {}

  bool are_one(std::size_t bytes) const { return each_ == nullptr && apart_ == bytes; }  // of so many each
  bool lie_by_themselves() const { return each_ != nullptr; }
  // Written only if it is the output's.
  unsigned char* operator()(std::size_t r) const {
    const void* const block = each_ != nullptr ? each_[r] : static_cast<const unsigned char*>(first_) + r * apart_;
    return static_cast<unsigned char*>(const_cast<void*>(block));
  }

 private:
  const void* first_ = nullptr;
  std::size_t apart_ = 0;
  const void* const* each_ = nullptr;
};

}  // namespace pycomm::shm
