// quantize(), topk(), pack() for avx512: see codec_body.h. What others share comes before the target.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../copy.h"
#include "isa.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,f16c")
#define PYCOMM_ISA avx512
#define PYCOMM_VECTOR_BYTES 64
#include "../common/elements.h"
#include "../common/pack_elements.h"
#include "../common/philox.h"
#include "../common/quantizers.h"
#include "../read_ahead.h"
#include "lanes.h"
#include "copy_body.h"
#include "codec_body.h"

namespace pycomm {
extern const Codecs kCodecsAvx512 = avx512::make_codecs();
}  // namespace pycomm
#endif
