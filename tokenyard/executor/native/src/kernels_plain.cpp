// The kernels for any CPU.
#include "formats.h"
#include "kernels.h"

#include <math.h>

#include "vec_plain.h"

#define TY_TABLE plain_kernels
#define TY_NAME "plain"
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
