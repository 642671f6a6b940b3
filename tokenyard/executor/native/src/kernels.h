// The table of kernels that each instruction set fills in. A kernel does one task of one thread; who runs which tasks
// is said in model.cpp and ops.cpp. Shapes are row-major.
//
// KV and weights are of one type, bf16 or float ("stored"). Inputs of products ("active") are bf16 where the CPU
// multiplies bf16 (`pairs`) and weights are bf16, else float. The residual stream, scores and sums are float. Weights of
// products may be int8 or packed in blocks instead; their inputs are then rows of bytes.
#pragma once

#include "api.h"
#include "common.h"

namespace ty {

constexpr int MAX_HEAD_DIM = 256;
constexpr int KEY_BLOCK = 64;      // keys that attend at once
constexpr int MAX_WIDTH = 16;      // most outputs in a panel
constexpr float NOTHING = -1e30f;  // a score that no key has
constexpr int STATE_COLUMNS = 32;  // of a recurrent state that are computed at once

enum Epilogue { STORE, ADD, SILU, GELU, CLAMPED };

// What a product takes its rows as: active numbers, bytes with a scale for each row, or bytes with a scale for each block
// (see block_row_bytes in formats.h).
enum RowForm { ACTIVE_ROWS, BYTE_ROWS, BLOCK_ROWS, ROW_FORMS };

// Whether a product's panels come in turns of gate and up.
constexpr bool gates(Epilogue epilogue) { return epilogue >= SILU; }

// LoRA. A product may be one of several projections over the same input, its parts; `first` .. first + count - 1 are those
// that a panel has outputs of, and `before` is the sum of the counts of all panels before it.
struct PanelParts {
    int64_t first, count, before;
};

// What an adapter adds to a product: (x * a^T) * b^T. a: for each part, panels of `width` of its ranks. b: panel after
// panel of the product, over the ranks of each of the panel's parts. rank: of a part, even; 0 where nothing is added.
struct Change {
    int64_t rank;
    void *a, *b;
};

// The changes of a product's rows. slots: each row's adapter, from 1, or 0 for none. inner: active[rows, ldi], what
// the row's own a gave of it, with round_up(rank, width) numbers a part. used: the slots that any row has.
struct Changes {
    const int32_t *slots;
    const int32_t *used;
    int64_t used_count;
    const Change *of_slot;
    const PanelParts *parts;
    const void *inner;
    int64_t ldi;
};

// The first half of that, for some rows and one panel of a: out, active[rows, ldo], gets `width` numbers a row. rows:
// which they are, of x and of out. next: where the weights lie that are used after these.
struct Shrinking {
    const void *x;
    int64_t ldx, inputs;
    const int32_t *rows;
    int64_t count;
    const void *panel, *next;
    void *out;
    int64_t ldo;
};

// y = x * weights^T + bias, of which a task computes some rows and some panels of outputs.
// A panel holds the weights of `width` outputs; `weights` begin with panel `first`, an even number. Distances of rows, ldx,
// are in active numbers or in bytes. bias: one number per output of the panels, or null.
// STORE, ADD: y is float[rows, ldy], overwritten or added to. The others gate: y is active[rows, ldy], half as wide, of
// silu(gate) * up, gelu(gate) * up by the formula with tanh, or gate * sigmoid(1.702 * gate) * (up + 1) with gate up to
// `limit` and up within it either way (gpt-oss).
struct Product {
    const void *x;
    int64_t ldx;
    const float *row_scales;  // of rows of bytes; else null
    const void *weights;
    const float *bias;
    int64_t inputs, outputs, first;
    Epilogue epilogue;
    void *y;
    int64_t ldy;
    const Changes *changes = nullptr;  // null where no row has an adapter
    float limit = 0.0f;                // of CLAMPED
};

// From a router's logits, float[rows, count], to the `active` experts that each row takes, best first and the lower
// number first of equal ones: chosen, and their weights, [rows, active] of both. The weights are a softmax over all
// experts, or over the chosen ones where they are to sum to one (`normed`); none where a logit is NaN or infinite.
struct Routing {
    const float *logits;
    int64_t count, active;
    bool normed;
    int32_t *chosen;
    float *weights;
};

// out[rows, size] = the sum over each row's `active` places of weight * found[place], in their order, added to what is
// there if `adding`. found: float[places, size]. places, weights: [rows, active].
struct Mixing {
    const float *found;
    const int32_t *places;
    const float *weights;
    int64_t active, size;
    bool adding;
    float *out;
};

// What comes after the product of q, k and v, for tokens first .. last - 1: norms of heads (null for none), rotation,
// and the way into the pool. qkv: float[tokens, (heads + 2 * kv_heads) * head_dim]. cos_sin: float[positions, rotated],
// cosines then sines, for the first `rotated` dimensions of each head; the others stay as they are. ldq: numbers from one
// token to the next in qkv. slots: where the tokens' keys and values go. keys, values: [slot, kv_heads, head_dim] as stored, or bytes
// with a scale behind each head; see kv_bytes.inc.
struct Placing {
    float *qkv;
    const float *q_norm, *k_norm;
    float eps;
    const float *cos_sin;
    const int64_t *positions, *slots;
    void *keys, *values;
    void *q;
    int heads, kv_heads, head_dim, rotated;
    int64_t ldq;
};

// Attention in one layer. q, out: active[tokens, heads * head_dim]. keys, values: [slot, kv_heads, head_dim] as stored, or bytes
// with a scale behind each head; see kv_bytes.inc.
struct Attending {
    const void *q;
    const void *keys, *values;
    void *out;
    int heads, kv_heads, head_dim;
    int window;  // tokens that a query sees, its own included; 0 for all
    float scale;
    float softcap = 0.0f;  // scores are held below it by softcap * tanh(score / softcap); 0 for none
    const float *sinks = nullptr;  // float[heads], a score of each head that has no value; null for none
};

// Part of the keys of a row of few queries. The queries are tokens `token` .. token + queries - 1 at positions from
// `position` upwards; slots[i] is the slot of the row's position i. The part is of positions begin .. end - 1 and key
// heads head_begin .. head_end - 1. `partial` takes, per query and head of the row, head_dim sums, the maximum and the
// sum of weights.
struct Part {
    const int32_t *slots;
    int64_t token;
    int queries;
    int64_t position, begin, end;
    int head_begin, head_end;
    float *partial;
    const Part *next = nullptr;  // probably the thread's next part, whose first block this one prefetches; null for none
    bool prefetched = false;     // whether it is the next part of another one
};

// Keys and values of one head of one row, laid out for products, KEY_BLOCK positions a block from block `first`.
// Positions before `begin` or from `end` on are zeros.
struct Packing {
    const int32_t *slots;
    int64_t first, begin, end;
    void *keys, *values;
};

// Queries of one head of a row that attends over packed keys: tokens `token` .. token + queries - 1.
struct Chunk {
    const void *keys, *values;
    int64_t first;
    int64_t token;
    int queries;
    int64_t position;
    int kv_head;
    bool scaled;  // keys and values are bytes, whose scales lie behind them
    void *space;  // chunk_space bytes
};

// The convolution of channels of a layer with a recurrent state, over what a product found: in, float[tokens, ldi]. times: what that is
// multiplied with before, null for nothing. weights: float[kernel, channels], the oldest token first. bias: float[channels]
// or null. states: [slot, kernel - 1, channels] as stored, the last inputs. out: float[tokens, channels].
struct Convolving {
    const float *in;
    int64_t ldi;
    const float *times, *weights, *bias;
    int kernel;
    int64_t channels;
    bool silu;
    void *states;
    float *out;
};

// The recurrence of a layer. mixed: float[tokens, channels], what the convolution found: queries and keys, of length one,
// and values (delta net), or values and how heads write and read (Mamba-2). The outputs take the place of the values, which
// begin at `values`. steps, strengths: float[tokens, ldi], what a product found for each head of the decay and, of a
// delta net, how much of a token is written. decay, step_bias, skip: float[heads], the latter of Mamba-2. factors:
// float[tokens, heads, 2], what remains of the state and what part of a token is written. states: float[slot, heads, ...].
struct Recurring {
    const ty_recurrent *facts;
    float *mixed;
    int64_t values;
    const float *steps, *strengths;
    int64_t ldi;
    const float *decay, *step_bias, *skip;
    float *factors;
    float *states;
};

// out[rows, size] (active) = x[rows, ldx] normed in parts of `part` and gated by silu(gate[rows, ldg]): norm[part] before
// the gate, or norm[size] after it. Where there is no norm, x * gate.
struct Gating {
    float *x;
    int64_t ldx;
    const float *gate;
    int64_t ldg;
    const float *norm;
    bool gate_first;
    int64_t size, part;
    float eps;
    void *out;
};

// One way to lay out weights for products.
struct PanelKernels {
    RowForm form;
    // Bytes of a row of weights with so many inputs before they are laid out.
    int64_t (*row_bytes)(int64_t inputs);
    // Bytes of a panel of weights with so many inputs.
    int64_t (*panel_bytes)(int64_t inputs);
    // Lay out `rows` (at most `width`) rows of weights as panel `panel`; further outputs are zeros.
    void (*pack_panel)(const void *weights, int64_t rows, int64_t inputs, void *panels, int64_t panel);
    // x[rows, size] = rows `ids` of weights in panels, as they were stored, times `scale`; null where a format has none.
    void (*embed_panels)(const void *panels, const int64_t *ids, float scale, float *x, int64_t rows, int64_t size);
    void (*product)(const Product &job, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end);
};

// What reads and writes the pool, whose keys and values are in one format.
struct KvKernels {
    void (*place)(const Placing &job, int64_t first, int64_t last);
    void (*attend_part)(const Attending &job, const Part &part);
    void (*pack_block)(const Attending &job, const Packing &packing, int kv_head, int64_t block);
};

// The kernels over one type of weights.
struct TypedKernels {
    bool active_is_bf16;
    PanelKernels formats[TY_FORMATS];  // by TY_STORED and what follows it
    // Lay out stored weights[lanes, inputs], `stride` numbers from one to the next, as lanes lane .. lane + lanes - 1 of
    // a panel of TY_STORED by itself, panel_bytes(padded) long; all else in it becomes zeros.
    void (*pack_lanes)(const void *weights, int64_t stride, int64_t lane, int64_t lanes, int64_t inputs, int64_t padded,
                       void *panel);
    void (*shrink)(const Shrinking &job);
    // Rows of active[rows, size] as bytes for products with int8 weights: `stride` bytes a row, a scale each.
    void (*round_rows)(const void *x, int64_t rows, int64_t size, uint8_t *bytes, int64_t stride, float *scales);
    // The same for products with weights in blocks; `size` is a multiple of a block's.
    void (*round_blocks)(const void *x, int64_t rows, int64_t size, char *out, int64_t stride);
    // out[rows, size] (active) = x[rows, size] / rms(x) * weight
    void (*norm)(const float *x, const float *weight, void *out, int64_t rows, int64_t size, float eps);
    // x[rows, size] += found[rows, size] / rms(found) * weight
    void (*add_norm)(const float *found, const float *weight, float *x, int64_t rows, int64_t size, float eps);
    // x[rows, size] = table[ids[row]] * scale
    void (*embed)(const void *table, const int64_t *ids, float scale, float *x, int64_t rows, int64_t size);
    // Rows first .. last - 1 of each.
    void (*route)(const Routing &job, int64_t first, int64_t last);
    void (*mix)(const Mixing &job, int64_t first, int64_t last);
    // Join `count` parts of a row into the output of some of its heads; `stride` floats lie between two partials.
    void (*join_parts)(const Attending &job, const Part &part, int64_t count, int64_t stride, int head_begin, int head_end);
    int64_t (*packed_block)(int head_dim);  // bytes of a block of keys, or of values, with their scales
    KvKernels kv[TY_KV_FORMATS];
    int64_t (*chunk_space)(int head_dim, int rows);
    void (*attend_chunk)(const Attending &job, const Chunk &chunk);
    // Channels begin .. end - 1 of one row with a state, and the last inputs after its runs.
    void (*convolve)(const Convolving &job, const ty_states &rows, int64_t row, int64_t begin, int64_t end);
    void (*gate_rows)(const Gating &job, int64_t first, int64_t last);
    // x[rows, size] (active) *= sigmoid(gate[rows, ldg])
    void (*gate_attended)(void *x, const float *gate, int64_t ldg, int64_t size, int64_t first, int64_t last);
    // x[rows, size] (active) *= sigmoid(of * weights), of: active[rows, hidden]
    void (*gate_shared)(void *x, int64_t size, const void *of, const float *weights, int64_t hidden, int64_t first,
                        int64_t last);
};

// Tokens to draw from logits: float[rows, stride], of which each row has `vocabulary`.
struct Drawing {
    const float *logits;
    int64_t stride, vocabulary;
};

// One of them. top_k: the vocabulary for all; top_p: 1 for all; min_p: 0 for all. uniform: from 0 to below 1.
struct Draw {
    int64_t row, top_k;
    double uniform;
    float temperature, top_p, min_p;
};

// Floats of working space that a draw needs.
constexpr int64_t draw_space(int64_t vocabulary) { return 5 * round_up(vocabulary, MAX_WIDTH) + 64; }

struct Kernels {
    const char *name, *block_instructions;  // the latter: of products of packed weights
    int width;
    TypedKernels bf16_kernels, float_kernels;
    // Hold count numbers below `cap`: cap * tanh(x / cap).
    void (*soften)(float *x, int64_t count, float cap);
    // The token; the vocabulary's last where a logit is NaN or none is finite.
    int64_t (*draw)(const Drawing &job, const Draw &one, float *space);
    // to[count] = x * by, the second one added to what is there.
    void (*scale)(const float *x, float by, float *to, int64_t count);
    void (*add_scaled)(const float *x, float by, float *to, int64_t count);
    // Give heads of `size` numbers, `stride` from one to the next, the length `factor`.
    void (*unit_heads)(float *x, int64_t stride, int64_t count, int size, float factor);
    // The factors of tokens first .. last - 1.
    void (*state_factors)(const Recurring &job, int64_t first, int64_t last);
    // One head of one row, and its state after the runs. space: see state_space.
    void (*delta)(const Recurring &job, const ty_states &rows, int64_t row, int head, float *space);
    void (*scan)(const Recurring &job, const ty_states &rows, int64_t row, int head, float *space);
};

// Floats of working space that a recurrence needs.
constexpr int64_t state_space(const ty_recurrent &facts) { return round_up(facts.key_dim, MAX_WIDTH) * STATE_COLUMNS; }

// Null where the library has no such kernels.
const Kernels *plain_kernels();
const Kernels *avx2_kernels();
const Kernels *avx512_kernels();
const Kernels *avx512_bf16_kernels();
const Kernels *neon_kernels();

}  // namespace ty
