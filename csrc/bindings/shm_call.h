// The arguments of a collective as Python passes them: addresses, codes and seconds.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "../kernels/reduce.h"
#include "../shm/group.h"

namespace pycomm {

inline void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }
inline std::int64_t nanoseconds(double seconds) { return seconds > 9e9 ? INT64_MAX / 2 : static_cast<std::int64_t>(seconds * 1e9); }

inline shm::Call make_call(shm::Verb verb, std::size_t numel, int dtype, int op, double factor, int root, double timeout_s) {
  if (dtype < 0 || dtype >= kDTypes || op < 0 || op >= kReduceOps) throw pybind11::value_error("unknown dtype or reduction code");
  const bool reduces = verb == shm::Verb::kAllReduce || verb == shm::Verb::kReduce || verb == shm::Verb::kReduceScatter;
  if (reduces && !reduce_supported(static_cast<DType>(dtype), static_cast<ReduceOp>(op)))
    throw pybind11::value_error("this reduction is not defined on this element type");
  shm::Call call{verb};
  call.dtype = static_cast<DType>(dtype);
  call.op = static_cast<ReduceOp>(op);
  call.numel = numel;
  call.factor = factor;
  call.root = root;
  call.timeout_ns = nanoseconds(timeout_s);
  return call;
}

}  // namespace pycomm
