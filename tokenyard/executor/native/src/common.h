// What all files of the library share: number formats and small helpers.
//
// Kernel files are compiled once per instruction set, so everything here has internal linkage: a function that the
// linker shared between them could carry instructions that the CPU lacks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// For functions that only prefetch: GCC takes them for functions without effect, and drops calls that are not inlined.
#if defined(__GNUC__)
#define TY_INLINE inline __attribute__((always_inline))
#else
#define TY_INLINE inline
#endif

namespace ty {

// What was read through a pointer is not kept for later: reading it again is faster than registers that are saved.
template <class T>
TY_INLINE void read_again(const T *&from) {
#if defined(__GNUC__)
    asm volatile("" : "+r"(from));
#else
    (void)from;
#endif
}

// A float32 without its lower 16 bits.
struct bf16 {
    uint16_t bits;
};

static inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

static inline float to_float(float x) { return x; }

// Round to nearest, ties to even; a NaN stays one.
static inline void from_float(float x, bf16 *out) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        out->bits = (uint16_t)((bits >> 16) | 0x40u);
    else
        out->bits = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline void from_float(float x, float *out) { *out = x; }

static constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static constexpr int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace ty
