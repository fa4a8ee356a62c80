// reduce() for avx512: see reduce_body.h. Standard headers come before the target, as their functions are shared.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "isa.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,f16c")
#define PYCOMM_ISA avx512
#define PYCOMM_VECTOR_BYTES 64
#include "../common/cases.h"
#include "../read_ahead.h"
#include "lanes.h"
#include "copy_body.h"
#include "reduce_body.h"

namespace pycomm {
extern const Isa kAvx512 = avx512::make_isa("avx512", IsaLevel::kAvx512);
}  // namespace pycomm
#endif
