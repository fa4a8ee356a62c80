// Who reduces what of a message that several ranks reduce together.
#pragma once

#include <algorithm>
#include <cstddef>

#include "layout.h"

namespace pycomm::shm {

// Part `index` of `parts` of `numel` elements: whole cache lines, so that no two ranks write one.
struct Part {
  std::size_t start, numel;
};
inline Part part_of(std::size_t numel, int index, int parts, std::size_t item) {
  const std::size_t per_line = std::max<std::size_t>(1, kLine / item);
  const std::size_t lines = (numel + per_line - 1) / per_line;
  const auto cut = [&](int i) {
    return std::min(numel, lines * static_cast<std::size_t>(i) / static_cast<std::size_t>(parts) * per_line);
  };
  return {cut(index), cut(index + 1) - cut(index)};
}

// No part is longer.
inline std::size_t part_bound(std::size_t numel, int parts, std::size_t item) {
  return numel / static_cast<std::size_t>(parts) + 2 * std::max<std::size_t>(1, kLine / item);
}

}  // namespace pycomm::shm
