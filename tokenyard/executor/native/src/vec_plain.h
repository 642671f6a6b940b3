// Eight float32 in an array, for any CPU: the compiler makes of it what the CPU has.
#pragma once

#include <cmath>

#include "common.h"
#include "formats.h"

namespace ty {
namespace {

constexpr int W = 8;
constexpr int TILE_ROWS = 4;
constexpr int QUERY_BLOCK = 2;

struct Vec {
    float at[W];
};

#define TY_EACH(expression)       \
    Vec found;                    \
    for (int i = 0; i < W; i++)   \
        found.at[i] = expression; \
    return found

inline Vec vset(float x) { TY_EACH(x); }
inline Vec vzero() { return vset(0.0f); }
template <class T>
inline Vec vload(const T *p) { TY_EACH(to_float(p[i])); }
template <class T>
inline Vec vload(const T *p, int n) { TY_EACH(i < n ? to_float(p[i]) : 0.0f); }
inline Vec vload_half(const void *p) { TY_EACH(half_to_float((const uint8_t *)p + 2 * i)); }
inline Vec vload_e4m3(const uint8_t *p) {
    uint16_t halves[W];
    for (int i = 0; i < W; i++)
        halves[i] = half_of_e4m3(p[i]);
    return vload_half(halves);
}
inline Vec vload_power(const uint8_t *p) { TY_EACH(power_of_two(p[i])); }
inline Vec vload_u8(const uint8_t *p) { TY_EACH((float)p[i]); }
inline Vec vload_s8(const int8_t *p) { TY_EACH((float)p[i]); }
template <class T>
inline void vstore(T *p, Vec x, int n = W) {
    for (int i = 0; i < n; i++)
        from_float(x.at[i], p + i);
}
inline void store_bytes(uint8_t *p, Vec x, int n) {
    for (int i = 0; i < n; i++)
        p[i] = (uint8_t)(int)nearbyintf(x.at[i]);
}
inline Vec vadd(Vec a, Vec b) { TY_EACH(a.at[i] + b.at[i]); }
inline Vec vsub(Vec a, Vec b) { TY_EACH(a.at[i] - b.at[i]); }
inline Vec vmul(Vec a, Vec b) { TY_EACH(a.at[i] * b.at[i]); }
inline Vec vdiv(Vec a, Vec b) { TY_EACH(a.at[i] / b.at[i]); }
inline Vec vmax(Vec a, Vec b) { TY_EACH(a.at[i] > b.at[i] ? a.at[i] : b.at[i]); }
inline Vec vmin(Vec a, Vec b) { TY_EACH(a.at[i] < b.at[i] ? a.at[i] : b.at[i]); }
inline Vec vfma(Vec a, Vec b, Vec c) { TY_EACH(a.at[i] * b.at[i] + c.at[i]); }
inline Vec vround(Vec x) { TY_EACH(nearbyintf(x.at[i])); }
inline Vec vscale2(Vec x, Vec n) { TY_EACH(ldexpf(x.at[i], (int)n.at[i])); }
inline float vsum(Vec x) {
    float found = 0.0f;
    for (int i = 0; i < W; i++)
        found += x.at[i];
    return found;
}
inline float vtop(Vec x) {
    float found = x.at[0];
    for (int i = 1; i < W; i++)
        found = x.at[i] > found ? x.at[i] : found;
    return found;
}
// Lanes lo .. hi - 1 of x, `other` elsewhere.
inline Vec vkeep(Vec x, int lo, int hi, Vec other) { TY_EACH(i >= lo && i < hi ? x.at[i] : other.at[i]); }
// The sums of W vectors, as one vector.
inline Vec vsums(const Vec *a) { TY_EACH(vsum(a[i])); }

#undef TY_EACH

TY_INLINE void prefetch(const void *p) { __builtin_prefetch(p); }
TY_INLINE void prefetch_far(const void *p) { __builtin_prefetch(p, 0, 2); }

}  // namespace
}  // namespace ty
