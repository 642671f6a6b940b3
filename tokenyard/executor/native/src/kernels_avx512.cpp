// The kernels for avx512.
#include "formats.h"
#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include <math.h>

#include "vec_avx512.h"

#define TY_TABLE avx512_kernels
#define TY_NAME "avx512"
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
const Kernels *avx512_kernels() { return nullptr; }
}  // namespace ty

#endif
