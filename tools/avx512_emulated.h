// The AVX-512 intrinsics that the kernels use, in plain C++, for a CPU that has AVX2 alone; see native_avx512.py.
// Included before each file of the library; with EMULATED_AVX512 defined (and EMULATED_BF16) it pretends that the compiler
// makes AVX-512 instructions (and those of VNNI and bfloat16).
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef EMULATED_AVX512

// After the real headers, which would otherwise take this for a compiler that makes such instructions.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
// Of a function whose instructions the compiler makes where the rest of the file has none of them.
#define target(features) unused
#ifdef EMULATED_BF16
#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1
#endif

namespace emulated {

template <class To, class From> inline To cast(const From &x) {
    static_assert(sizeof(To) == sizeof(From), "the same bytes");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

template <class T, int N> struct Lanes {
    T at[N];
    template <class V> static Lanes of(const V &x) { return cast<Lanes>(x); }
};
typedef Lanes<float, 16> F32;
typedef Lanes<int32_t, 16> I32;
typedef Lanes<uint32_t, 16> U32;
typedef Lanes<int16_t, 32> I16;
typedef Lanes<uint16_t, 32> U16;
typedef Lanes<uint8_t, 64> U8;
typedef Lanes<int8_t, 64> I8;
typedef Lanes<double, 8> F64;

#define TY_EACH(T, N, V, EXPRESSION)         \
    do {                                     \
        T y_;                                \
        for (int i = 0; i < N; i++)          \
            y_.at[i] = EXPRESSION;           \
        return cast<V>(y_);                  \
    } while (0)
#define TY_ARGS2(T) const T x = T::of(a), z = T::of(b)

inline __m512 set1_ps(float a) { TY_EACH(F32, 16, __m512, a); }
inline __m512 setzero_ps() { return set1_ps(0.0f); }
inline __m512i set1_epi32(int a) { TY_EACH(I32, 16, __m512i, a); }
inline __m512i set1_epi8(char a) { TY_EACH(I8, 64, __m512i, (int8_t)a); }
template <class... Ints> inline __m512i setr_epi32(Ints... ints) {
    const int32_t given[16] = {ints...};
    return cast<__m512i>(given);
}

inline __m512 loadu_ps(const void *p) { __m512 x; memcpy(&x, p, 64); return x; }
inline __m512i loadu_si512(const void *p) { __m512i x; memcpy(&x, p, 64); return x; }
inline void storeu_ps(void *p, __m512 x) { memcpy(p, &x, 64); }
inline void storeu_si512(void *p, __m512i x) { memcpy(p, &x, 64); }
inline __m512 maskz_loadu_ps(__mmask16 m, const void *p) {
    TY_EACH(F32, 16, __m512, (m >> i & 1) ? ((const float *)p)[i] : 0.0f);
}
inline __m512i maskz_loadu_epi16(__mmask32 m, const void *p) {
    TY_EACH(U16, 32, __m512i, (m >> i & 1) ? ((const uint16_t *)p)[i] : (uint16_t)0);
}
inline __m256i maskz_loadu_epi16_256(__mmask16 m, const void *p) {
    typedef Lanes<uint16_t, 16> Half;
    TY_EACH(Half, 16, __m256i, (m >> i & 1) ? ((const uint16_t *)p)[i] : (uint16_t)0);
}
inline void mask_storeu_ps(void *p, __mmask16 m, __m512 a) {
    const F32 x = F32::of(a);
    for (int i = 0; i < 16; i++)
        if (m >> i & 1) ((float *)p)[i] = x.at[i];
}
inline void mask_storeu_epi16_256(void *p, __mmask16 m, __m256i a) {
    const auto x = cast<Lanes<uint16_t, 16>>(a);
    for (int i = 0; i < 16; i++)
        if (m >> i & 1) ((uint16_t *)p)[i] = x.at[i];
}
inline void mask_cvtepi32_storeu_epi8(void *p, __mmask16 m, __m512i a) {
    const I32 x = I32::of(a);
    for (int i = 0; i < 16; i++)
        if (m >> i & 1) ((int8_t *)p)[i] = (int8_t)x.at[i];
}

inline __m512 add_ps(__m512 a, __m512 b) { TY_ARGS2(F32); TY_EACH(F32, 16, __m512, x.at[i] + z.at[i]); }
inline __m512 sub_ps(__m512 a, __m512 b) { TY_ARGS2(F32); TY_EACH(F32, 16, __m512, x.at[i] - z.at[i]); }
inline __m512 mul_ps(__m512 a, __m512 b) { TY_ARGS2(F32); TY_EACH(F32, 16, __m512, x.at[i] * z.at[i]); }
inline __m512 div_ps(__m512 a, __m512 b) { TY_ARGS2(F32); TY_EACH(F32, 16, __m512, x.at[i] / z.at[i]); }
// Of a NaN and another number the second one.
inline __m512 max_ps(__m512 a, __m512 b) { TY_ARGS2(F32); TY_EACH(F32, 16, __m512, x.at[i] > z.at[i] ? x.at[i] : z.at[i]); }
inline __m512 min_ps(__m512 a, __m512 b) { TY_ARGS2(F32); TY_EACH(F32, 16, __m512, x.at[i] < z.at[i] ? x.at[i] : z.at[i]); }
inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    TY_ARGS2(F32);
    const F32 w = F32::of(c);
    TY_EACH(F32, 16, __m512, fmaf(x.at[i], z.at[i], w.at[i]));
}
inline __m512 roundscale_ps(__m512 a, int) { const F32 x = F32::of(a); TY_EACH(F32, 16, __m512, nearbyintf(x.at[i])); }
inline __m512 scalef_ps(__m512 a, __m512 b) {
    TY_ARGS2(F32);
    TY_EACH(F32, 16, __m512,
            z.at[i] != z.at[i] ? z.at[i]
                               : ldexpf(x.at[i], (int)floorf(fminf(fmaxf(z.at[i], -1000.0f), 1000.0f))));
}
inline float reduce_add_ps(__m512 a) {
    F32 x = F32::of(a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            x.at[i] += x.at[i + half];
    return x.at[0];
}
inline float reduce_max_ps(__m512 a) {
    F32 x = F32::of(a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            x.at[i] = x.at[i] > x.at[i + half] ? x.at[i] : x.at[i + half];
    return x.at[0];
}

inline __m512i add_epi32(__m512i a, __m512i b) { TY_ARGS2(U32); TY_EACH(U32, 16, __m512i, x.at[i] + z.at[i]); }
inline __m512i sub_epi32(__m512i a, __m512i b) { TY_ARGS2(U32); TY_EACH(U32, 16, __m512i, x.at[i] - z.at[i]); }
inline __m512i and_si512(__m512i a, __m512i b) { TY_ARGS2(U32); TY_EACH(U32, 16, __m512i, x.at[i] & z.at[i]); }
inline __m512i or_si512(__m512i a, __m512i b) { TY_ARGS2(U32); TY_EACH(U32, 16, __m512i, x.at[i] | z.at[i]); }
inline __m512i ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
    TY_ARGS2(U32);
    const U32 w = U32::of(c);
    U32 y;
    for (int i = 0; i < 16; i++) {
        uint32_t found = 0;
        for (int bit = 0; bit < 32; bit++) {
            const int place = (x.at[i] >> bit & 1) << 2 | (z.at[i] >> bit & 1) << 1 | (w.at[i] >> bit & 1);
            found |= (uint32_t)(table >> place & 1) << bit;
        }
        y.at[i] = found;
    }
    return cast<__m512i>(y);
}
inline __m512i slli_epi32(__m512i a, unsigned n) { const U32 x = U32::of(a); TY_EACH(U32, 16, __m512i, n > 31 ? 0u : x.at[i] << n); }
inline __m512i srli_epi32(__m512i a, unsigned n) { const U32 x = U32::of(a); TY_EACH(U32, 16, __m512i, n > 31 ? 0u : x.at[i] >> n); }
inline __m512i slli_epi16(__m512i a, unsigned n) { const U16 x = U16::of(a); TY_EACH(U16, 32, __m512i, (uint16_t)(x.at[i] << n)); }
inline __m512i srli_epi16(__m512i a, unsigned n) { const U16 x = U16::of(a); TY_EACH(U16, 32, __m512i, (uint16_t)(x.at[i] >> n)); }

inline __m512i cvtepu8_epi32(__m128i a) { const auto x = cast<Lanes<uint8_t, 16>>(a); TY_EACH(I32, 16, __m512i, x.at[i]); }
inline __m512i cvtepi8_epi32(__m128i a) { const auto x = cast<Lanes<int8_t, 16>>(a); TY_EACH(I32, 16, __m512i, x.at[i]); }
inline __m512i cvtepu16_epi32(__m256i a) { const auto x = cast<Lanes<uint16_t, 16>>(a); TY_EACH(I32, 16, __m512i, x.at[i]); }
inline __m256i cvtepi32_epi16(__m512i a) {
    typedef Lanes<int16_t, 16> Half;
    const I32 x = I32::of(a);
    TY_EACH(Half, 16, __m256i, (int16_t)x.at[i]);
}
inline __m512 cvtepi32_ps(__m512i a) { const I32 x = I32::of(a); TY_EACH(F32, 16, __m512, (float)x.at[i]); }
inline __m512i cvtps_epi32(__m512 a) {
    const F32 x = F32::of(a);
    TY_EACH(I32, 16, __m512i, fabsf(x.at[i]) < 2147483648.0f ? (int32_t)nearbyintf(x.at[i]) : INT32_MIN);
}
inline __m512 cvtph_ps(__m256i a) {
    const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(a)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
    const __m256 both[2] = {low, high};
    return cast<__m512>(both);
}
inline __m512i castps_si512(__m512 a) { return cast<__m512i>(a); }
inline __m512 castsi512_ps(__m512i a) { return cast<__m512>(a); }
inline __m512d castps_pd(__m512 a) { return cast<__m512d>(a); }
inline __m512 castpd_ps(__m512d a) { return cast<__m512>(a); }

inline __mmask16 cmp_ps_mask(__m512 a, __m512 b, int) {  // _CMP_UNORD_Q alone
    TY_ARGS2(F32);
    __mmask16 m = 0;
    for (int i = 0; i < 16; i++)
        m |= (__mmask16)((isnan(x.at[i]) || isnan(z.at[i])) << i);
    return m;
}
inline __m512 mask_mov_ps(__m512 a, __mmask16 m, __m512 b) { TY_ARGS2(F32); TY_EACH(F32, 16, __m512, (m >> i & 1) ? z.at[i] : x.at[i]); }
inline __m512i mask_mov_epi32(__m512i a, __mmask16 m, __m512i b) { TY_ARGS2(I32); TY_EACH(I32, 16, __m512i, (m >> i & 1) ? z.at[i] : x.at[i]); }

// Shuffles work within blocks of 128 bits but for shuffle_f32x4 and permutex2var.
inline __m512 unpacklo_ps(__m512 a, __m512 b) { TY_ARGS2(F32); TY_EACH(F32, 16, __m512, (i & 1 ? z : x).at[(i & ~3) + (i & 3) / 2]); }
inline __m512 unpackhi_ps(__m512 a, __m512 b) { TY_ARGS2(F32); TY_EACH(F32, 16, __m512, (i & 1 ? z : x).at[(i & ~3) + 2 + (i & 3) / 2]); }
inline __m512d unpacklo_pd(__m512d a, __m512d b) { TY_ARGS2(F64); TY_EACH(F64, 8, __m512d, (i & 1 ? z : x).at[i & ~1]); }
inline __m512d unpackhi_pd(__m512d a, __m512d b) { TY_ARGS2(F64); TY_EACH(F64, 8, __m512d, (i & 1 ? z : x).at[i | 1]); }
inline __m512i unpacklo_epi16(__m512i a, __m512i b) { TY_ARGS2(I16); TY_EACH(I16, 32, __m512i, (i & 1 ? z : x).at[(i & ~7) + (i & 7) / 2]); }
inline __m512i unpackhi_epi16(__m512i a, __m512i b) { TY_ARGS2(I16); TY_EACH(I16, 32, __m512i, (i & 1 ? z : x).at[(i & ~7) + 4 + (i & 7) / 2]); }
inline __m512 shuffle_f32x4(__m512 a, __m512 b, int places) {
    TY_ARGS2(F32);
    TY_EACH(F32, 16, __m512, (i < 8 ? x : z).at[(places >> (i / 4 * 2) & 3) * 4 + (i & 3)]);
}
inline __m512 permutex2var_ps(__m512 a, __m512i places, __m512 b) {
    TY_ARGS2(F32);
    const I32 p = I32::of(places);
    TY_EACH(F32, 16, __m512, (p.at[i] & 16 ? z : x).at[p.at[i] & 15]);
}
inline __m512i broadcast_i32x4(__m128i a) { const auto x = cast<Lanes<int32_t, 4>>(a); TY_EACH(I32, 16, __m512i, x.at[i & 3]); }
inline __m512i shuffle_epi8(__m512i a, __m512i b) {
    TY_ARGS2(U8);
    TY_EACH(U8, 64, __m512i, z.at[i] & 0x80 ? (uint8_t)0 : x.at[(i & ~15) + (z.at[i] & 15)]);
}

inline __m512i dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    const U8 x = U8::of(a);
    const I8 z = I8::of(b);
    const I32 s = I32::of(sums);
    TY_EACH(I32, 16, __m512i,
            s.at[i] + x.at[4 * i] * z.at[4 * i] + x.at[4 * i + 1] * z.at[4 * i + 1] +
                x.at[4 * i + 2] * z.at[4 * i + 2] + x.at[4 * i + 3] * z.at[4 * i + 3]);
}

// Instructions of bfloat16 take denormals for zeros, and make none.
inline float flushed(float x) { return fpclassify(x) == FP_SUBNORMAL ? copysignf(0.0f, x) : x; }
inline float widened(uint16_t x) { return flushed(cast<float>((uint32_t)x << 16)); }
inline __m512 dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    TY_ARGS2(U16);
    const F32 s = F32::of(sums);
    TY_EACH(F32, 16, __m512,
            flushed(fmaf(widened(x.at[2 * i]), widened(z.at[2 * i]),
                         flushed(fmaf(widened(x.at[2 * i + 1]), widened(z.at[2 * i + 1]), flushed(s.at[i]))))));
}
inline __m256bh cvtneps_pbh(__m512 a) {
    typedef Lanes<uint16_t, 16> Half;
    const F32 x = F32::of(a);
    Half y;
    for (int i = 0; i < 16; i++) {
        const uint32_t bits = cast<uint32_t>(flushed(x.at[i]));
        y.at[i] = (uint16_t)(isnan(x.at[i]) ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    return cast<__m256bh>(y);
}

#undef TY_EACH
#undef TY_ARGS2

}  // namespace emulated

#define _mm512_add_epi32 emulated::add_epi32
#define _mm512_add_ps emulated::add_ps
#define _mm512_and_si512 emulated::and_si512
#define _mm512_broadcast_i32x4 emulated::broadcast_i32x4
#define _mm512_castpd_ps emulated::castpd_ps
#define _mm512_castps_pd emulated::castps_pd
#define _mm512_castps_si512 emulated::castps_si512
#define _mm512_castsi512_ps emulated::castsi512_ps
#define _mm512_cmp_ps_mask emulated::cmp_ps_mask
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_div_ps emulated::div_ps
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_loadu_ps emulated::loadu_ps
#define _mm512_loadu_si512 emulated::loadu_si512
#define _mm512_mask_cvtepi32_storeu_epi8 emulated::mask_cvtepi32_storeu_epi8
#define _mm512_mask_mov_epi32 emulated::mask_mov_epi32
#define _mm512_mask_mov_ps emulated::mask_mov_ps
#define _mm512_mask_storeu_ps emulated::mask_storeu_ps
#define _mm512_maskz_loadu_epi16 emulated::maskz_loadu_epi16
#define _mm512_maskz_loadu_ps emulated::maskz_loadu_ps
#define _mm512_max_ps emulated::max_ps
#define _mm512_min_ps emulated::min_ps
#define _mm512_mul_ps emulated::mul_ps
#define _mm512_or_si512 emulated::or_si512
#define _mm512_permutex2var_ps emulated::permutex2var_ps
#define _mm512_reduce_add_ps emulated::reduce_add_ps
#define _mm512_reduce_max_ps emulated::reduce_max_ps
#define _mm512_roundscale_ps emulated::roundscale_ps
#define _mm512_scalef_ps emulated::scalef_ps
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_epi8 emulated::set1_epi8
#define _mm512_set1_ps emulated::set1_ps
#undef _mm512_setr_epi32
#define _mm512_setr_epi32 emulated::setr_epi32
#define _mm512_setzero_ps emulated::setzero_ps
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#define _mm512_shuffle_f32x4 emulated::shuffle_f32x4
#define _mm512_slli_epi16 emulated::slli_epi16
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_srli_epi16 emulated::srli_epi16
#define _mm512_srli_epi32 emulated::srli_epi32
#define _mm512_storeu_ps emulated::storeu_ps
#define _mm512_storeu_si512 emulated::storeu_si512
#define _mm512_sub_epi32 emulated::sub_epi32
#define _mm512_sub_ps emulated::sub_ps
#define _mm512_ternarylogic_epi32 emulated::ternarylogic_epi32
#define _mm512_unpackhi_epi16 emulated::unpackhi_epi16
#define _mm512_unpackhi_pd emulated::unpackhi_pd
#define _mm512_unpackhi_ps emulated::unpackhi_ps
#define _mm512_unpacklo_epi16 emulated::unpacklo_epi16
#define _mm512_unpacklo_pd emulated::unpacklo_pd
#define _mm512_unpacklo_ps emulated::unpacklo_ps
#define _mm256_maskz_loadu_epi16 emulated::maskz_loadu_epi16_256
#define _mm256_mask_storeu_epi16 emulated::mask_storeu_epi16_256

#endif

// The library asks the CPU what it has.
#define __builtin_cpu_supports(feature) 1
