// reduce() for avx2: see reduce_body.h. Standard headers come before the target, as their functions are shared.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "isa.h"

#pragma GCC target("avx2,fma,f16c")
#define PYCOMM_ISA avx2
#define PYCOMM_VECTOR_BYTES 32
#include "../common/cases.h"
#include "../read_ahead.h"
#include "lanes.h"
#include "copy_body.h"
#include "reduce_body.h"

namespace pycomm {
extern const Isa kAvx2 = avx2::make_isa("avx2", IsaLevel::kAvx2);
}  // namespace pycomm
#endif
