// The kernels for avx2.
#include "formats.h"
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__)

#include <math.h>

#include "vec_avx2.h"

#define TY_TABLE avx2_kernels
#define TY_NAME "avx2"
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
const Kernels *avx2_kernels() { return nullptr; }
}  // namespace ty

#endif
