// Compiled without fused multiplication and addition, so that numbers are those of the gguf package bit for bit.
#include "formats.h"

namespace ty {

namespace {

template <class F>
void unpack(const void *table, const int64_t *ids, float scale, float *x, int64_t rows, int64_t size) {
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *raw = (const uint8_t *)table + ids[r] * raw_row_bytes<F>(size);
        for (int64_t k = 0; k < size; k += F::INPUTS, raw += F::BYTES)
            for (int i = 0; i < F::INPUTS; i += F::SPAN, x += F::SPAN) {
                int values[F::SPAN];
                for (int j = 0; j < F::SPAN; j++)
                    values[j] = F::value(F::code(raw, i + j)) - F::ZERO;
                unpack_span(values, F::SPAN, F::scale(raw, i / F::SPAN), F::least_of(raw, i / F::SPAN), scale, x);
            }
    }
}

template <class F>
void unpack_floats(const void *table, const int64_t *ids, float scale, float *x, int64_t rows, int64_t size) {
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *raw = (const uint8_t *)table + ids[r] * raw_row_bytes<F>(size);
        for (int64_t k = 0; k < size; k += F::INPUTS, raw += F::BYTES) {
            float times;
            memcpy(&times, raw, 4);
            for (int i = 0; i < F::INPUTS; i++) {
                const uint16_t half = half_of_e4m3(raw[4 + i]);
                *x++ = half_to_float((const uint8_t *)&half) * 256.0f * times * scale;
            }
        }
    }
}

}  // namespace

void unpack_span(const int *values, int count, float times, float least, float scale, float *x) {
    for (int i = 0; i < count; i++) {
        const float own = times * (float)values[i];
        x[i] = (own - least) * scale;
    }
}

void unpack_rows(int format, const void *table, const int64_t *ids, float scale, float *x, int64_t rows, int64_t size) {
    switch (format) {
    case TY_Q4_0: return unpack<Q4_0>(table, ids, scale, x, rows, size);
    case TY_Q8_0: return unpack<Q8_0>(table, ids, scale, x, rows, size);
    case TY_Q4_K: return unpack<Q4_K>(table, ids, scale, x, rows, size);
    case TY_Q6_K: return unpack<Q6_K>(table, ids, scale, x, rows, size);
    case TY_Q4_1: return unpack<Q4_1>(table, ids, scale, x, rows, size);
    case TY_Q5_0: return unpack<Q5_0>(table, ids, scale, x, rows, size);
    case TY_Q5_1: return unpack<Q5_1>(table, ids, scale, x, rows, size);
    case TY_Q5_K: return unpack<Q5_K>(table, ids, scale, x, rows, size);
    case TY_IQ4_NL: return unpack<IQ4_NL>(table, ids, scale, x, rows, size);
    case TY_IQ4_XS: return unpack<IQ4_XS>(table, ids, scale, x, rows, size);
    case TY_MXFP4: return unpack<MXFP4>(table, ids, scale, x, rows, size);
    case TY_INT4_32: return unpack<INT4_32>(table, ids, scale, x, rows, size);
    case TY_INT4_128: return unpack<INT4_128>(table, ids, scale, x, rows, size);
    case TY_INT8_32: return unpack<INT8_32>(table, ids, scale, x, rows, size);
    case TY_INT8_128: return unpack<INT8_128>(table, ids, scale, x, rows, size);
    case TY_FP8_32: return unpack_floats<FP8_32>(table, ids, scale, x, rows, size);
    case TY_FP8_128: return unpack_floats<FP8_128>(table, ids, scale, x, rows, size);
    default: return;
    }
}

}  // namespace ty
