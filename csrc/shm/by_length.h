// What is chosen for messages of like length: what pays for long ones need not for shorter ones.
#pragma once

#include <array>
#include <cstddef>
#include <type_traits>

namespace pycomm::shm {

// One `Each` for each of some classes of lengths: shorter than `second_from`, then each `factor` times as long as the one before.
template <class Each, std::size_t classes, std::size_t second_from, std::size_t factor>
class ByLength {
 public:
  ByLength() = default;
  template <class All, class = std::enable_if_t<std::is_convertible_v<All, Each>>>
  ByLength(const All& all) {
    each_.fill(all);
  }
  Each& of(std::size_t bytes) { return each_[class_of(bytes)]; }
  const Each& of(std::size_t bytes) const { return each_[class_of(bytes)]; }

 private:
  static std::size_t class_of(std::size_t bytes) {
    std::size_t i = 0;
    for (std::size_t from = second_from; i + 1 < classes && bytes >= from; from *= factor) ++i;
    return i;
  }

  std::array<Each, classes> each_{};
};

}  // namespace pycomm::shm
