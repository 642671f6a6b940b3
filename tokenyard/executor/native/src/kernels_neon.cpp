// The kernels for Arm with dot products: the vectors are plain ones, which the compiler makes NEON's.
#include "formats.h"
#include "kernels.h"

#if defined(__ARM_FEATURE_DOTPROD)

#include <arm_neon.h>
#include <math.h>

#include "vec_plain.h"

#define TY_TABLE neon_kernels
#define TY_NAME "neon-dotprod"
#define TY_BF16_ACTIVE float

#include "product.inc"
#include "lora.inc"
#include "bytes.inc"
#include "blocks.inc"
#include "fp8.inc"
#include "draw.inc"
#include "kv_bytes.inc"
#include "rows.inc"
#include "experts.inc"
#include "recurrent.inc"
#include "attention.inc"
#include "dispatch.inc"

#else

namespace ty {
const Kernels *neon_kernels() { return nullptr; }
}  // namespace ty

#endif
