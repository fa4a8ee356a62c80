// What one instruction set offers. Each of reduce_{avx512,avx2,generic}.cpp compiles reduce_body.h into an Isa, each of
// codec_{avx512,avx2,generic}.cpp codec_body.h into its Codecs; isa.cpp and codecs.cpp pick one at run time.
#pragma once

#include "../pack.h"
#include "../quantize.h"
#include "../reduce.h"

namespace pycomm {

// One call of a kernel: the bytes [begin, end) of every input, reduced to `output`.
struct ReduceJob {
  char* output;  // where the byte `begin` goes
  char* const* outputs;  // of run_to_all instead, whole
  const char* const* inputs;
  std::size_t begin, end;
  const double* factors;
  int num_inputs, num_outputs, divisor;  // of kAvg. Last: after padding the compiler would write `begin` in parts, and reading it whole waits
};

struct ReduceKernel {
  void (*run)(const ReduceJob&);           // null where the operator is not defined on the element type
  void (*run_streamed)(const ReduceJob&);  // with non-temporal stores, without the fence; null: by way of a block
  void (*run_to_all)(const ReduceJob&);    // to several outputs; null: by way of a block
};

enum class IsaLevel { kGeneric, kAvx2, kAvx512 };

// The pass of topk() that reads everything: elements whose magnitude (as bits) is at least `least` go to `indices` and
// `values`, the first `capacity` of them. With a residual the input is flat + residual, which the residual then holds.
struct CollectPass {
  const float* flat;
  float* residual;
  std::size_t numel;
  std::int32_t least;
  std::int32_t* indices;
  float* values;
  std::size_t capacity;
};

inline constexpr std::size_t kLongBytes = std::size_t{32} << 20;  // what is as long is in no cache

// Whether input of so many bytes is read by pages; see [Note: reading ahead].
bool reads_by_pages(std::size_t bytes);

// How contiguous elements are converted: with plain stores, past the caches, or that and read by pages.
enum class Run { kCached, kStreamed, kByPages };

struct Codecs {
  void (*quantize[kPayloadFormats])(const QuantizeJob&);
  void (*dequantize[kPayloadFormats])(const DequantizeJob&);
  std::size_t (*collect)(const CollectPass&);  // returns how many there are, also beyond the capacity
  // float32, float16 and bfloat16, by PackType: to, from
  void (*convert[kPackTypes][kPackTypes])(char* to, const char* from, std::size_t numel, float scale, Run run);
};

struct Isa {
  const char* name;
  IsaLevel level;
  ReduceKernel reduce[kDTypes][kReduceOps];
  void (*copy_streamed)(char* destination, const char* source, std::size_t bytes);  // without the fence
};

#if defined(__x86_64__)
extern const Isa kAvx512;
extern const Isa kAvx2;
extern const Codecs kCodecsAvx512;
extern const Codecs kCodecsAvx2;
#endif
extern const Isa kGeneric;
extern const Codecs kCodecsGeneric;

// The one in use.
const Isa& active_isa();
const Codecs& active_codecs();

// Makes non-temporal stores visible before what is stored after it: they are not ordered by themselves.
void store_fence();

}  // namespace pycomm
