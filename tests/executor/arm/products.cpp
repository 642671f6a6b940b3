// Products of packed weights by every kind of kernels that the CPU has, against sums of the unpacked numbers.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "api.h"

namespace {

const int INPUTS = 256, OUTPUTS = 50, BLOCK = 32;
// Bytes of 256 inputs, and of a block.
const int BYTES[TY_FORMATS] = {0, 0, 144, 272, 144, 210, 160, 176, 192, 176, 144, 136, 136, 168, 138, 288, 264, 288, 264};
const int BLOCK_BYTES[TY_FORMATS] = {0, 0, 18, 34, 144, 210, 20, 22, 24, 176, 18, 136, 17, 21, 69, 36, 132, 36, 132};

uint32_t state = 1;
uint32_t draw() { return state = state * 1664525u + 1013904223u; }

// Bits of any kind, with scales that are small numbers.
std::vector<uint8_t> random_rows(int format) {
    const int size = BLOCK_BYTES[format];
    std::vector<uint8_t> rows((size_t)(OUTPUTS * BYTES[format]));
    for (uint8_t &byte : rows)
        byte = (uint8_t)(draw() >> 24);
    for (size_t at = 0; at < rows.size(); at += (size_t)size) {
        uint8_t *block = rows.data() + at;
        const uint16_t half = 0x1400 + (draw() >> 24);  // about 0.001
        const float number = 0.001f * (float)(1 + (draw() >> 28));
        if (format == TY_MXFP4)
            block[0] = (uint8_t)(118 + (draw() >> 30));
        else if (format >= TY_INT4_32)
            __builtin_memcpy(block, &number, 4);
        else
            __builtin_memcpy(block + (format == TY_Q6_K ? 208 : 0), &half, 2);
        if (format == TY_Q4_1 || format == TY_Q5_1 || format == TY_Q4_K || format == TY_Q5_K)
            __builtin_memcpy(block + 2, &half, 2);
    }
    return rows;
}

double worst(int level, int format, int rows) {
    void *pool = ty_pool_new(2, nullptr);
    const std::vector<uint8_t> weights = random_rows(format);
    const int32_t formats[] = {format};
    const int64_t outputs[] = {OUTPUTS};
    void *linear = ty_linear_new(pool, level, TY_FLOAT32, INPUTS, 0, 1, formats, outputs);
    ty_linear_set(linear, 0, weights.data(), nullptr);
    std::vector<float> x((size_t)(rows * INPUTS)), y((size_t)(rows * OUTPUTS)), whole((size_t)(OUTPUTS * INPUTS));
    for (size_t i = 0; i < x.size(); i++)  // bytes, of which each block has the largest, so that none is rounded
        x[i] = i % BLOCK == 0 ? 127.0f : (float)((int)(draw() >> 24) - 128 + (int)(draw() >> 31));
    for (float &one : x)
        one = one < -127.0f ? -127.0f : one > 127.0f ? 127.0f : one;
    std::vector<int64_t> ids;
    for (int i = 0; i < OUTPUTS; i++)
        ids.push_back(i);
    ty_unpack_rows(format, weights.data(), ids.data(), OUTPUTS, INPUTS, whole.data());
    ty_linear_run(linear, x.data(), rows, y.data());
    double found = 0.0;
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < OUTPUTS; o++) {
            double exact = 0.0, size = 1e-6;
            for (int i = 0; i < INPUTS; i++) {
                const double one = (double)x[(size_t)(r * INPUTS + i)] * whole[(size_t)(o * INPUTS + i)];
                exact += one;
                size += fabs(one);
            }
            found = fmax(found, fabs(y[(size_t)(r * OUTPUTS + o)] - exact) / size);
        }
    ty_linear_free(linear);
    ty_pool_free(pool);
    return found;
}

}  // namespace

int main() {
    int levels = 0, failed = 0;
    for (int level = 0; level <= ty_best_level(); level++) {
        if (!ty_level_name(level))
            continue;
        levels++;
        for (int format = TY_Q4_0; format < TY_FORMATS; format++)
            for (int rows : {1, 3, 13}) {
                const double error = worst(level, format, rows);
                if (!(error < 4e-6)) {
                    printf("%s: format %d, %d rows: off by %g\n", ty_level_name(level), format, rows, error);
                    failed++;
                }
            }
    }
    printf("%d kinds of kernels, the best with %s\n", levels, ty_packed_instructions(ty_best_level()));
    return failed != 0;
}
