// quantize(), topk(), pack() for generic: see codec_body.h. What others share comes before the target.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../copy.h"
#include "isa.h"

#define PYCOMM_ISA generic
#define PYCOMM_VECTOR_BYTES 16
#include "../common/elements.h"
#include "../common/pack_elements.h"
#include "../common/philox.h"
#include "../common/quantizers.h"
#include "../read_ahead.h"
#include "lanes.h"
#include "copy_body.h"
#include "codec_body.h"

namespace pycomm {
extern const Codecs kCodecsGeneric = generic::make_codecs();
}  // namespace pycomm
