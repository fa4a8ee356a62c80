// The codecs for one instruction set. Compiled three times, by codec_{avx512,avx2,generic}.cpp, which define
//   PYCOMM_ISA           the namespace
//   PYCOMM_VECTOR_BYTES  the width of a vector register
// and set the target. It has no include guard on purpose, and includes only its own parts.

#include "reach_body.h"
#include "quantize_body.h"
#include "dequantize_body.h"
#include "topk_body.h"
#include "pack_body.h"

namespace pycomm::PYCOMM_ISA {

constexpr Codecs make_codecs() {
  Codecs codecs{};
  for (int format = 0; format < kPayloadFormats; ++format) {
    codecs.quantize[format] = visit_format(static_cast<PayloadFormat>(format), [](auto known) {
      return static_cast<void (*)(const QuantizeJob&)>(run_quantize<decltype(known)>);
    });
    codecs.dequantize[format] = visit_format(static_cast<PayloadFormat>(format), [](auto known) {
      return static_cast<void (*)(const DequantizeJob&)>(run_dequantize<decltype(known)>);
    });
  }
  codecs.collect = run_collect;
  fill_conversions(codecs);
  return codecs;
}

}  // namespace pycomm::PYCOMM_ISA
