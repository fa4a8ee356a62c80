// reduce() for generic: see reduce_body.h. Standard headers come before the target, as their functions are shared.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "isa.h"

#define PYCOMM_ISA generic
#define PYCOMM_VECTOR_BYTES 16
#include "../common/cases.h"
#include "../read_ahead.h"
#include "lanes.h"
#include "copy_body.h"
#include "reduce_body.h"

namespace pycomm {
extern const Isa kGeneric = generic::make_isa("generic", IsaLevel::kGeneric);
}  // namespace pycomm
