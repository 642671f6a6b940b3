// Sixteen float32 in an AVX-512 register.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace ty {
namespace {

constexpr int W = 16;
constexpr int TILE_ROWS = 12;  // rows of a tile of two panels
constexpr int QUERY_BLOCK = 4; // queries that share a pass over values

typedef __m512 Vec;

inline __mmask16 first_lanes(int n) { return (__mmask16)((1u << n) - 1u); }

inline Vec vzero() { return _mm512_setzero_ps(); }
inline Vec vset(float x) { return _mm512_set1_ps(x); }
inline Vec vload(const float *p) { return _mm512_loadu_ps(p); }
inline Vec vload(const float *p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline Vec widen(__m256i half) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)); }
inline Vec vload(const bf16 *p) { return widen(_mm256_loadu_si256((const __m256i *)p)); }
inline Vec vload(const bf16 *p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
inline void vstore(float *p, Vec x) { _mm512_storeu_ps(p, x); }
inline void vstore(float *p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }

inline Vec vload_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
// Numbers of E4M3, times 2 ** -8: their sign and further bits where float16 has them.
inline Vec vload_e4m3(const uint8_t *p) {
    const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 8);
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((int16_t)0xbfff)));
}
inline Vec vload_u8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
inline Vec vload_s8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

// 2 ** (exponent - 128)
inline Vec vload_power(const uint8_t *p) {
    const __m512i exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_scalef_ps(vset(1.0f), _mm512_cvtepi32_ps(_mm512_sub_epi32(exponents, _mm512_set1_epi32(128))));
}

inline __m256i narrow(Vec x) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
#endif
}

inline void vstore(bf16 *p, Vec x) { _mm256_storeu_si256((__m256i *)p, narrow(x)); }
inline void vstore(bf16 *p, Vec x, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x)); }

inline void store_bytes(uint8_t *p, Vec x, int n) {
    _mm512_mask_cvtepi32_storeu_epi8(p, first_lanes(n), _mm512_cvtps_epi32(x));
}

inline Vec vadd(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec vsub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec vmul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec vdiv(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec vmin(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec vfma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec vround(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec vscale2(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline float vsum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float vtop(Vec x) { return _mm512_reduce_max_ps(x); }

// Lanes lo .. hi - 1 of x, `other` elsewhere.
inline Vec vkeep(Vec x, int lo, int hi, Vec other) {
    __mmask16 mask = (__mmask16)(first_lanes(hi) & ~first_lanes(lo));
    return _mm512_mask_mov_ps(other, mask, x);
}

// The sums of sixteen vectors, as one vector: a butterfly of unpacks and shuffles.
inline Vec vsums(const Vec *a) {
    Vec b[8], c[4];
    for (int i = 0; i < 8; i++)
        b[i] = vadd(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(b[2 * i]), y = _mm512_castps_pd(b[2 * i + 1]);
        c[i] = vadd(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    Vec d0 = vadd(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
    Vec d1 = vadd(_mm512_shuffle_f32x4(c[2], c[3], 0x88), _mm512_shuffle_f32x4(c[2], c[3], 0xdd));
    return vadd(_mm512_shuffle_f32x4(d0, d1, 0x88), _mm512_shuffle_f32x4(d0, d1, 0xdd));
}

TY_INLINE void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
TY_INLINE void prefetch_far(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

}  // namespace
}  // namespace ty
