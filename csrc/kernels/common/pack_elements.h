// What pack() and unpack() do with an element, and where it is in a strided tensor. CPU and CUDA share it.
#pragma once

#include "../pack.h"
#include "elements.h"

namespace pycomm {

template <PackType type>
using PackElement = std::conditional_t<type == PackType::kFloat32, Native<float>,
                                       std::conditional_t<type == PackType::kFloat16, Small<Float16Format>, BFloat16>>;

// Whether an element keeps its bits on the way, so that it is not widened and rounded (which would change a NaN).
PYCOMM_HD bool keeps_bits(PackType from, PackType to, float scale) { return from == to && scale == 1.0f; }

// Calls visit(PackElement<type>{}) and returns its answer.
template <class Visit>
PYCOMM_HD auto visit_pack_type(PackType type, Visit visit) {
  switch (type) {
    case PackType::kFloat16: return visit(PackElement<PackType::kFloat16>{});
    case PackType::kBFloat16: return visit(PackElement<PackType::kBFloat16>{});
    default: return visit(PackElement<PackType::kFloat32>{});
  }
}

// Where element `index`, in the order of the shape, lies from the first one, in elements.
PYCOMM_HD std::int64_t strided_offset(std::size_t index, const std::int64_t* shape, const std::int64_t* strides, int ndim) {
  std::int64_t offset = 0;
  for (int dim = ndim - 1; dim >= 0; --dim) {
    const auto length = static_cast<std::size_t>(shape[dim]);
    offset += static_cast<std::int64_t>(index % length) * strides[dim];
    index /= length;
  }
  return offset;
}

}  // namespace pycomm
