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

// Whether `n` parts lie one behind the other; `lengths` counts their elements, of `item` bytes.
inline bool lie_as_one(const void* const* parts, const std::size_t* lengths, std::size_t n, std::size_t item) {
  for (std::size_t r = 1; r < n; ++r)
    if (parts[r] != static_cast<const unsigned char*>(parts[r - 1]) + lengths[r - 1] * item) return false;
  return true;
}

}  // namespace pycomm::shm
