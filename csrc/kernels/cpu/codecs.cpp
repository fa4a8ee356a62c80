// Hands the calls of quantize.h on to the instruction set in use.
#include "isa.h"

namespace pycomm {

const Codecs& active_codecs() {
  switch (active_isa().level) {
#if defined(__x86_64__)
    case IsaLevel::kAvx512: return kCodecsAvx512;
    case IsaLevel::kAvx2: return kCodecsAvx2;
#endif
    default: return kCodecsGeneric;
  }
}

void quantize(const QuantizeJob& job) {
  active_codecs().quantize[static_cast<int>(job.format)](job);
  if (job.is_streamed) store_fence();
}

void dequantize(const DequantizeJob& job) {
  active_codecs().dequantize[static_cast<int>(job.format)](job);
  if (job.is_streamed) store_fence();
}

}  // namespace pycomm
