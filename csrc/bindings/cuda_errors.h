// What CUDA said of a kernel that was queued, as Python's exception.
#pragma once

#include <stdexcept>
#include <string>

#include "../kernels/cuda/reduce.h"

namespace pycomm {

inline void check_cuda(const char* who, int error) {
  if (error != 0) throw std::runtime_error(std::string(who) + ": CUDA says: " + cuda_error_string(error));
}

}  // namespace pycomm
