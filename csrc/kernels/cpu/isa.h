// What one instruction set offers. Each of reduce_{avx512,avx2,generic}.cpp compiles reduce_body.h into one of these;
// reduce.cpp picks one at run time.
#pragma once

#include "../reduce.h"

namespace pycomm {

// One call of a kernel: the bytes [begin, end) of every input, reduced to `output`.
struct ReduceJob {
  char* output;  // where the byte `begin` goes
  const char* const* inputs;
  std::size_t begin, end;
  const double* factors;
  int num_inputs;  // last: padding before `begin` would let the compiler write it in parts, which the kernel waits for
};

struct ReduceKernel {
  void (*run)(const ReduceJob&);           // null where the operator is not defined on the element type
  void (*run_streamed)(const ReduceJob&);  // with non-temporal stores, without the fence; null: by way of a block
};

struct Isa {
  const char* name;
  ReduceKernel reduce[kDTypes][kReduceOps];
  void (*copy_streamed)(char* destination, const char* source, std::size_t bytes);  // without the fence
};

#if defined(__x86_64__)
extern const Isa kAvx512;
extern const Isa kAvx2;
#endif
extern const Isa kGeneric;

}  // namespace pycomm
