// Eight float32 in an AVX register.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace ty {
namespace {

constexpr int W = 8;
constexpr int TILE_ROWS = 6;
constexpr int QUERY_BLOCK = 2;

typedef __m256 Vec;

inline Vec vzero() { return _mm256_setzero_ps(); }
inline Vec vset(float x) { return _mm256_set1_ps(x); }
inline __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec vload(const float *p) { return _mm256_loadu_ps(p); }
inline Vec vload(const float *p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline Vec widen(__m128i half) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)); }
inline Vec vload(const bf16 *p) { return widen(_mm_loadu_si128((const __m128i *)p)); }
inline Vec vload(const bf16 *p, int n) {
    alignas(16) bf16 whole[8] = {};
    memcpy(whole, p, (size_t)n * sizeof(bf16));
    return vload(whole);
}
inline void vstore(float *p, Vec x) { _mm256_storeu_ps(p, x); }
inline void vstore(float *p, Vec x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }

inline Vec vload_half(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
// Numbers of E4M3, times 2 ** -8: their sign and further bits where float16 has them.
inline Vec vload_e4m3(const uint8_t *p) {
    const __m128i high = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p)), 8);
    return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16((int16_t)0xbfff)));
}
inline Vec vload_u8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
inline Vec vload_s8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

// 2 ** (exponent - 128)
inline Vec vload_power(const uint8_t *p) {
    const __m256i exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    const __m256i usual = _mm256_slli_epi32(_mm256_sub_epi32(exponents, _mm256_set1_epi32(1)), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x200000), exponents);
    const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), exponents);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(usual, small, is_small));
}

inline __m128i narrow(Vec x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    __m256 chosen = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
    __m256i high = _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

inline void vstore(bf16 *p, Vec x) { _mm_storeu_si128((__m128i *)p, narrow(x)); }
inline void vstore(bf16 *p, Vec x, int n) {
    alignas(16) bf16 whole[8];
    vstore(whole, x);
    memcpy(p, whole, (size_t)n * sizeof(bf16));
}

inline void store_bytes(uint8_t *p, Vec x, int n) {
    const __m128i lowest = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i whole = _mm256_cvtps_epi32(x);
    const __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128(whole), lowest);
    const __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256(whole, 1), lowest);
    const int64_t all = _mm_cvtsi128_si64(_mm_unpacklo_epi32(low, high));
    memcpy(p, &all, (size_t)n);
}

inline Vec vadd(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec vsub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec vmul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec vdiv(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec vmax(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec vmin(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec vfma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec vround(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec vscale2(Vec x, Vec n) {
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return vmul(x, _mm256_castsi256_ps(exponent));
}
inline float vsum(Vec x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float vtop(Vec x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// Lanes lo .. hi - 1 of x, `other` elsewhere.
inline Vec vkeep(Vec x, int lo, int hi, Vec other) {
    __m256i mask = _mm256_andnot_si256(first_lanes(lo), first_lanes(hi));
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(mask));
}

// The sums of eight vectors, as one vector.
inline Vec vsums(const Vec *a) {
    Vec low = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    Vec high = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
    return vadd(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

TY_INLINE void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
TY_INLINE void prefetch_far(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

}  // namespace
}  // namespace ty
