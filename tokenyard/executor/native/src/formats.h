// Weights in blocks, each number a few bits with a scale that its block shares, as GGUF files have them (ggml's
// ggml-common.h is their definition). What a block holds is read here, one number at a time; blocks.inc lays it out for
// products. Everything has internal linkage; see common.h.
#pragma once

#include "api.h"
#include "common.h"

namespace ty {

constexpr int BLOCK = 32;  // inputs of a row that are rounded to bytes with one scale

// BLOCK inputs of a row, rounded to bytes: an input is about scale * byte. sum: of all bytes, first_sum: of the first half.
// moment: scale * sum.
struct RoundedBlock {
    int8_t bytes[BLOCK];
    float scale, moment;
    int32_t sum, first_sum;

    // The sum of the bytes of one of so many spans, one or two.
    inline int32_t sum_of(int span, int spans) const { return spans == 1 ? sum : span ? sum - first_sum : first_sum; }
};

// Bytes of a row that is rounded by blocks, which lie one after the other.
static constexpr int64_t block_row_bytes(int64_t inputs) {
    return round_up(inputs / BLOCK * (int64_t)sizeof(RoundedBlock), 64);
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

// Each format: INPUTS numbers in BYTES bytes. A code has BITS bits and means value(code) from 0 up. A number is scale *
// (value - ZERO), or scale * value - least where MIN. A scale is for SPAN inputs, BLOCK or half of it. TABLE: whether
// values are others than the codes.

template <int inputs, int bytes, int bits, int zero, bool min = false, int span = 32>
struct Format {
    static constexpr int INPUTS = inputs, BYTES = bytes, BITS = bits, ZERO = zero, SPAN = span;
    static constexpr bool MIN = min, TABLE = false;
    static inline int value(uint8_t code) { return code; }
    static inline float scale(const uint8_t *raw, int) { return half_to_float(raw); }
    static inline float least_of(const uint8_t *, int) { return 0.0f; }
};

// The lower four bits of 32 numbers in 16 bytes: those of the first half, then those of the second.
static inline uint8_t low_bits(const uint8_t *raw, int i) { return i < 16 ? raw[i] & 15 : raw[i - 16] >> 4; }
static inline uint8_t bit_of(const uint8_t *raw, int i) { return raw[i / 8] >> i % 8 & 1; }

struct Q4_0 : Format<32, 18, 4, 8> {
    static inline uint8_t code(const uint8_t *raw, int i) { return low_bits(raw + 2, i); }
};

struct Q4_1 : Format<32, 20, 4, 0, true> {
    static inline uint8_t code(const uint8_t *raw, int i) { return low_bits(raw + 4, i); }
    static inline float least_of(const uint8_t *raw, int) { return -half_to_float(raw + 2); }
};

struct Q5_0 : Format<32, 22, 5, 16> {
    static inline uint8_t code(const uint8_t *raw, int i) {
        return (uint8_t)(low_bits(raw + 6, i) | bit_of(raw + 2, i) << 4);
    }
};

struct Q5_1 : Format<32, 24, 5, 0, true> {
    static inline uint8_t code(const uint8_t *raw, int i) {
        return (uint8_t)(low_bits(raw + 8, i) | bit_of(raw + 4, i) << 4);
    }
    static inline float least_of(const uint8_t *raw, int) { return -half_to_float(raw + 2); }
};

struct Q8_0 : Format<32, 34, 8, 128> {
    static inline uint8_t code(const uint8_t *raw, int i) { return raw[2 + i] ^ 0x80; }
};

// Scale and least value of each 32 of 256 inputs are 6 bits each, times a float16 of all.
template <int bytes, int bits>
struct SmallScales : Format<256, bytes, bits, 0, true> {
    static inline uint8_t small_scale(const uint8_t *raw, int span) {
        const uint8_t *packed = raw + 4;
        return span < 4 ? packed[span] & 63 : (uint8_t)((packed[span + 4] & 15) | (packed[span - 4] >> 6) << 4);
    }
    static inline uint8_t small_least(const uint8_t *raw, int span) {
        const uint8_t *packed = raw + 4;
        return span < 4 ? packed[span + 4] & 63 : (uint8_t)(packed[span + 4] >> 4 | (packed[span] >> 6) << 4);
    }
    static inline float scale(const uint8_t *raw, int span) { return half_to_float(raw) * (float)small_scale(raw, span); }
    static inline float least_of(const uint8_t *raw, int span) {
        return half_to_float(raw + 2) * (float)small_least(raw, span);
    }
};

// Of each 64 inputs the second 32 are the upper halves of the bytes.
static inline uint8_t of_64(const uint8_t *raw, int i) {
    const uint8_t two = raw[i / 64 * 32 + i % 32];
    return i % 64 < 32 ? two & 15 : two >> 4;
}

struct Q4_K : SmallScales<144, 4> {
    static inline uint8_t code(const uint8_t *raw, int i) { return of_64(raw + 16, i); }
};

struct Q5_K : SmallScales<176, 5> {
    static inline uint8_t code(const uint8_t *raw, int i) {
        return (uint8_t)(of_64(raw + 48, i) | (raw[16 + i % 32] >> i / 32 & 1) << 4);
    }
};

// The scale of each 16 of 256 inputs is a signed byte, times a float16 of all.
struct Q6_K : Format<256, 210, 6, 32, false, 16> {
    static inline uint8_t code(const uint8_t *raw, int i) {
        const int half = i / 128, at = i % 128;
        const uint8_t low = raw[half * 64 + at % 64], high = raw[128 + half * 32 + at % 32];
        return (uint8_t)((at < 64 ? low & 15 : low >> 4) | (high >> at / 32 * 2 & 3) << 4);
    }
    static inline int8_t small_scale(const uint8_t *raw, int span) { return (int8_t)raw[192 + span]; }
    static inline float scale(const uint8_t *raw, int span) {
        return half_to_float(raw + 208) * (float)small_scale(raw, span);
    }
};

static const uint8_t IQ4_VALUES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

struct IQ4_NL : Format<32, 18, 4, 128> {
    static constexpr bool TABLE = true;
    static inline const uint8_t *values() { return IQ4_VALUES; }
    static inline int value(uint8_t code) { return IQ4_VALUES[code]; }
    static inline uint8_t code(const uint8_t *raw, int i) { return low_bits(raw + 2, i); }
};

// The scale of each 32 of 256 inputs has 6 bits, from -32 up.
struct IQ4_XS : Format<256, 136, 4, 128> {
    static constexpr bool TABLE = true;
    static inline const uint8_t *values() { return IQ4_VALUES; }
    static inline int value(uint8_t code) { return IQ4_VALUES[code]; }
    static inline uint8_t code(const uint8_t *raw, int i) { return low_bits(raw + 8 + i / 32 * 16, i % 32); }
    static inline int8_t small_scale(const uint8_t *raw, int span) {
        const int low = raw[4 + span / 2] >> span % 2 * 4 & 15, high = raw[2 + span / 4] >> span % 4 * 2 & 3;
        return (int8_t)((low | high << 4) - 32);
    }
    static inline float scale(const uint8_t *raw, int span) {
        return half_to_float(raw) * (float)small_scale(raw, span);
    }
};

static const uint8_t FOUR_BIT_FLOATS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// 2 ** (exponent - 128)
static inline float power_of_two(uint8_t exponent) {
    const uint32_t bits = exponent < 2 ? 0x200000u << exponent : (uint32_t)(exponent - 1) << 23;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

// Twice a float of four bits, times half a power of two (OCP Microscaling Formats 1.0).
struct MXFP4 : Format<32, 17, 4, 12> {
    static constexpr bool TABLE = true;
    static inline const uint8_t *values() { return FOUR_BIT_FLOATS; }
    static inline int value(uint8_t code) { return FOUR_BIT_FLOATS[code]; }
    static inline uint8_t code(const uint8_t *raw, int i) { return low_bits(raw + 1, i); }
    static inline float scale(const uint8_t *raw, int) { return power_of_two(raw[0]); }
};

// Groups of unsigned numbers with a float scale and a zero point: what AWQ and GPTQ checkpoints are rewritten to.
template <int inputs>
struct Grouped : Format<inputs, 5 + inputs / 2, 4, 0, true> {
    static inline uint8_t code(const uint8_t *raw, int i) { return low_bits(raw + 5 + i / 32 * 16, i % 32); }
    static inline float scale(const uint8_t *raw, int) {
        float found;
        memcpy(&found, raw, 4);
        return found;
    }
    static inline float least_of(const uint8_t *raw, int) { return scale(raw, 0) * (float)raw[4]; }
};

typedef Grouped<32> INT4_32;
typedef Grouped<128> INT4_128;

// Groups of signed bytes with a float scale.
template <int inputs>
struct SignedBytes : Format<inputs, 4 + inputs, 8, 128> {
    static inline uint8_t code(const uint8_t *raw, int i) { return raw[4 + i] ^ 0x80; }
    static inline float scale(const uint8_t *raw, int) {
        float found;
        memcpy(&found, raw, 4);
        return found;
    }
};

typedef SignedBytes<32> INT8_32;
typedef SignedBytes<128> INT8_128;

// Groups of floats of eight bits (OCP E4M3, none of which is NaN) with a float scale.
template <int inputs>
struct Floats8 {
    static constexpr int INPUTS = inputs, BYTES = 4 + inputs;
};

typedef Floats8<32> FP8_32;
typedef Floats8<128> FP8_128;

// The float16 with the bits of an E4M3 number, which is 2 ** -8 times it.
static inline uint16_t half_of_e4m3(uint8_t bits) { return (uint16_t)((bits & 0x80u) << 8 | (bits & 0x7fu) << 7); }

template <class F>
static constexpr int64_t raw_row_bytes(int64_t inputs) {
    return inputs / F::INPUTS * F::BYTES;
}

// x[count] = (times * values - least) * scale, each operation rounded for itself.
void unpack_span(const int *values, int count, float times, float least, float scale, float *x);

// x[rows, size] = rows `ids` of a table in a format that is kept packed, times `scale`.
void unpack_rows(int format, const void *table, const int64_t *ids, float scale, float *x, int64_t rows, int64_t size);

}  // namespace ty
