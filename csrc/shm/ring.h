// Memory of which all ranks take the same places in the same order; [Note: the ring] and [Note: the common ring] in group.h.
#pragma once

#include <cstddef>

#include "layout.h"

namespace pycomm::shm {

class Ring {
 public:
  Ring(int number, std::size_t bytes) : number_(number), bytes_(bytes) {}

  std::size_t number() const { return static_cast<std::size_t>(number_); }  // of the rings that lie side by side
  // The place of the next `bytes`.
  std::size_t take(std::size_t bytes) {
    bytes = round_up(bytes, kLine);
    if (next_ + bytes > bytes_) next_ = 0;
    const std::size_t place = next_;
    next_ += bytes;
    return place;
  }
  // `sender` begins a message, where the one before began if that was the other's and it `goes_back`.
  void begin(int sender, bool goes_back) {
    if (goes_back && sender_ >= 0 && sender_ != sender) {
      next_ = start_;
    } else {
      start_ = next_;
    }
    sender_ = sender;
  }
  // From the beginning: the ranks have not all taken the same.
  void restart() {
    next_ = start_ = 0;
    sender_ = -1;
  }

  bool is_populated = false;

 private:
  int number_;
  std::size_t bytes_;
  std::size_t next_ = 0, start_ = 0;  // the latter of the message before
  int sender_ = -1;                   // of that
};

}  // namespace pycomm::shm
