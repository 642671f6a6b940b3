// Weights in blocks, each number a few bits with a scale that its block shares, as GGUF files have them (ggml's
// ggml-common.h is their definition). What a block holds is read here, one number at a time; blocks.inc lays it out for
// products. Everything has internal linkage; see common.h.
#pragma once

#include "api.h"
#include "common.h"

namespace ty {

constexpr int BLOCK = 32;  // inputs of a row that are rounded to bytes with one scale

// Bytes of a row that is rounded by blocks: a byte for each input, then the scales of all blocks, float, then the sums of
// each half of each block, int32.
static constexpr int64_t block_row_bytes(int64_t inputs) {
    return round_up(inputs + inputs / BLOCK * (int64_t)(sizeof(float) + 2 * sizeof(int32_t)), 64);
}

static inline float half_to_float(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
    uint32_t bits = sign | (exponent + 112) << 23 | fraction << 13;
    if (exponent == 31)
        bits = sign | 0x7f800000u | fraction << 13;
    float found;
    if (exponent == 0) {
        found = (float)fraction * 0x1p-24f;
        return sign ? -found : found;
    }
    memcpy(&found, &bits, 4);
    return found;
}

// Each format: INPUTS numbers in BYTES bytes. A number is scale * (code - ZERO), or scale * code - least where MIN. Codes
// are from 0 up and have BITS bits. A scale is for SPAN inputs, BLOCK or half of it.

struct Q4_0 {
    static constexpr int INPUTS = 32, BYTES = 18, BITS = 4, ZERO = 8, SPAN = 32;
    static constexpr bool MIN = false;
    static inline uint8_t code(const uint8_t *raw, int i) { return i < 16 ? raw[2 + i] & 15 : raw[i - 14] >> 4; }
    static inline float scale(const uint8_t *raw, int) { return half_to_float(raw); }
    static inline float least_of(const uint8_t *, int) { return 0.0f; }
};

struct Q8_0 {
    static constexpr int INPUTS = 32, BYTES = 34, BITS = 8, ZERO = 128, SPAN = 32;
    static constexpr bool MIN = false;
    static inline uint8_t code(const uint8_t *raw, int i) { return raw[2 + i] ^ 0x80; }
    static inline float scale(const uint8_t *raw, int) { return half_to_float(raw); }
    static inline float least_of(const uint8_t *, int) { return 0.0f; }
};

// Scale and least value of each 32 of 256 inputs are 6 bits each, times a float16 of all.
struct Q4_K {
    static constexpr int INPUTS = 256, BYTES = 144, BITS = 4, ZERO = 0, SPAN = 32;
    static constexpr bool MIN = true;
    static inline uint8_t code(const uint8_t *raw, int i) {
        const uint8_t two = raw[16 + i / 64 * 32 + i % 32];
        return i % 64 < 32 ? two & 15 : two >> 4;
    }
    static inline uint8_t small_scale(const uint8_t *raw, int span) {
        const uint8_t *packed = raw + 4;
        return span < 4 ? packed[span] & 63 : (packed[span + 4] & 15) | (packed[span - 4] >> 6) << 4;
    }
    static inline uint8_t small_least(const uint8_t *raw, int span) {
        const uint8_t *packed = raw + 4;
        return span < 4 ? packed[span + 4] & 63 : packed[span + 4] >> 4 | (packed[span] >> 6) << 4;
    }
    static inline float scale(const uint8_t *raw, int span) { return half_to_float(raw) * (float)small_scale(raw, span); }
    static inline float least_of(const uint8_t *raw, int span) {
        return half_to_float(raw + 2) * (float)small_least(raw, span);
    }
};

// The scale of each 16 of 256 inputs is a signed byte, times a float16 of all.
struct Q6_K {
    static constexpr int INPUTS = 256, BYTES = 210, BITS = 6, ZERO = 32, SPAN = 16;
    static constexpr bool MIN = false;
    static inline uint8_t code(const uint8_t *raw, int i) {
        const int half = i / 128, at = i % 128;
        const uint8_t low = raw[half * 64 + at % 64], high = raw[128 + half * 32 + at % 32];
        return (uint8_t)((at < 64 ? low & 15 : low >> 4) | (high >> at / 32 * 2 & 3) << 4);
    }
    static inline int8_t small_scale(const uint8_t *raw, int span) { return (int8_t)raw[192 + span]; }
    static inline float scale(const uint8_t *raw, int span) {
        return half_to_float(raw + 208) * (float)small_scale(raw, span);
    }
    static inline float least_of(const uint8_t *, int) { return 0.0f; }
};

template <class F>
static constexpr int64_t raw_row_bytes(int64_t inputs) {
    return inputs / F::INPUTS * F::BYTES;
}

// x[rows, size] = rows `ids` of a table in a format that is kept packed, times `scale`.
void unpack_rows(int format, const void *table, const int64_t *ids, float scale, float *x, int64_t rows, int64_t size);

}  // namespace ty
