// The C interface of the library. Everything is called from one thread at a time. A call that returns int gives 0, or 1
// where memory ran out.
#pragma once

#include <stdint.h>

#define TY_API extern "C" __attribute__((visibility("default")))

enum { TY_BF16, TY_FLOAT32 };
// What weights of products are: as they are stored, rounded to int8 as they are laid out, or packed as in GGUF files; the
// last six are groups of 32 or 128 numbers: of four bits with a zero point, signed bytes, floats of eight bits (E4M3). See
// formats.h.
enum {
    TY_STORED, TY_INT8, TY_Q4_0, TY_Q8_0, TY_Q4_K, TY_Q6_K, TY_Q4_1, TY_Q5_0, TY_Q5_1, TY_Q5_K, TY_IQ4_NL, TY_IQ4_XS,
    TY_MXFP4, TY_INT4_32, TY_INT4_128, TY_INT8_32, TY_INT8_128, TY_FP8_32, TY_FP8_128, TY_FORMATS
};
// Keys and values in the pool: in the dtype, or bytes with a float for each head of a token behind its numbers.
enum { TY_KV_STORED, TY_KV_INT8, TY_KV_E4M3, TY_KV_E5M2, TY_KV_FORMATS };
enum { TY_QKV, TY_OUTPUT, TY_GATE_UP, TY_DOWN, TY_HEAD, TY_ROUTER };
enum { TY_SILU, TY_GELU, TY_CLAMPED };
enum {
    TY_ATTENTION_NORM, TY_MLP_NORM, TY_Q_NORM, TY_K_NORM, TY_AFTER_ATTENTION, TY_AFTER_MLP, TY_SINKS, TY_SHARED_GATE,
    TY_CONV, TY_CONV_BIAS, TY_DECAY, TY_STEP_BIAS, TY_SKIP, TY_MIXER_NORM, TY_LAST_NORM
};
enum { TY_DELTA_NET, TY_MAMBA2, TY_SHORT_CONV };
enum { TY_MAX_CONV = 16 };  // most tokens that a convolution sees

// Layers of experts, all alike; see ExpertFacts in experts.h. gate: one of TY_SILU, TY_GELU, TY_CLAMPED.
struct ty_experts {
    int32_t dtype, int8, hidden, inter, count, active, normed, gate;
    float gate_limit;
};

// Layers with a recurrent state in the place of attention, all alike. Their product TY_QKV gives, one after the other,
// of TY_DELTA_NET: queries and keys (groups * key_dim each) and values (heads * value_dim), which are the `channels` of
// a convolution over `kernel` tokens; a gate for each value; for each head how much of a token is written, and the step of
// the decay. Of TY_MAMBA2: the gate; values (heads * value_dim), how groups of heads write and read (groups * key_dim
// each), which are the channels; the step of each head, within step_min and step_max. Of TY_SHORT_CONV: channels that are
// multiplied with the third part before the convolution, and with the second after it.
struct ty_recurrent {
    int32_t kind, groups, heads, key_dim, value_dim, kernel, channels;
    float step_min, step_max;
};

// int8: products take weights rounded to int8 where ty_model_parts names no format. rotated: dimensions of a head that
// are. gate, gate_limit: see ty_experts. embedding_format: TY_STORED or a packed one. kv_format: of the pool.
// embedding_scale: on embeddings. attention_scale, attention_softcap: see Attending in kernels.h; logit_softcap likewise,
// of logits. windows: int32[layers], tokens that a query sees, 0 for all. cos_sin:
// float[positions, rotated] for each layer, which must outlive the model. experts: null for none; expert_layers:
// int32[layers], whether a layer has experts in the place of gate, up and down. shared: intermediate size of an expert
// that each token of such a layer takes, which is its gate, up and down; 0 for none. output_gate: whether q, k and v end
// with gates of what attention finds. residual_scale: on what is added to the residual stream; logit_scale likewise, of
// logits. recurrent: null for none; recurrent_layers: int32[layers], whether a layer is one.
struct ty_config {
    int32_t dtype, int8, layers, hidden, inter, heads, kv_heads, head_dim, rotated, gate, embedding_format, kv_format;
    int32_t shared, output_gate;
    float eps, gate_limit, embedding_scale, attention_scale, attention_softcap, logit_softcap, residual_scale, logit_scale;
    int64_t vocabulary;
    const int32_t *windows;
    const float *const *cos_sin;
    const ty_experts *experts;
    const int32_t *expert_layers;
    const ty_recurrent *recurrent;
    const int32_t *recurrent_layers;
};

// The states of a step's rows. Row r is runs run_ends[r] .. run_ends[r + 1] - 1 of tokens, one after the other from token
// firsts[r] on; it continues the state in slot sources[r], or none for -1. After a run of counts[run] tokens the state
// goes to slots targets[target_ends[run]] .. targets[target_ends[run + 1] - 1]. A run without targets is the last of its row; kept
// takes what its product found: float[layers with a state, kept_tokens, outputs of the product], run after run. conv:
// [layer][slot, kernel - 1, channels] as stored; recurrent: float[layer][slot, heads, ...], of a delta net [key_dim, value_dim], of
// Mamba-2 [value_dim, key_dim]. They have conv_bytes and recurrent_bytes from one layer to the next.
struct ty_states {
    int64_t rows;
    const int64_t *firsts, *sources, *run_ends, *counts, *target_ends, *targets;
    void *conv, *recurrent;
    int64_t conv_bytes, recurrent_bytes;
    float *kept;
    int64_t kept_tokens;
};

// kv: the pool, [layer][keys, values][slot, kv_heads, head_dim], with plane_bytes between two planes. See Rows in ops.h.
// token_ids, positions, slots, pool_rows: int64[tokens]. starts, counts: int64[rows]. logits: float[logit_count,
// vocabulary], of the tokens logit_tokens. adapters: int32[tokens], the slot of each token's adapter from 1, or 0 for
// none; null where none has one. window_kv: the pool of the layers with a window where those have one, in
// which layers count by themselves, with window_slots and window_table for it; else null. states: of layers that have one.
struct ty_step {
    int64_t tokens, rows, logit_count;
    const int64_t *token_ids, *positions, *slots, *pool_rows, *starts, *counts, *logit_tokens;
    const int32_t *page_table;
    int64_t page_table_stride;
    int32_t page_size, fixed_order;
    float *logits;
    void *kv;
    int64_t plane_bytes;
    const int32_t *adapters;
    void *window_kv;
    int64_t window_plane_bytes;
    const int64_t *window_slots;
    const int32_t *window_table;
    int64_t window_table_stride;
    const ty_states *states;
};

// Attention by itself: q and out are active[tokens, heads * head_dim], keys and values of one layer. See Attending in
// kernels.h.
struct ty_attention {
    int32_t heads, kv_heads, head_dim, window;
    float scale, softcap;
    const void *q, *keys, *values;
    void *out;
    const float *sinks;
};

// Of ty_config, ty_step, ty_attention, ty_experts, ty_recurrent, ty_states: a check that both sides mean the same.
TY_API int64_t ty_size_of(int which);
TY_API int ty_best_level(void);        // the best kernels that this CPU can run
TY_API const char *ty_level_name(int level);  // null where the library or the CPU lacks it
// What multiplies packed weights, for people to read.
TY_API const char *ty_packed_instructions(int level);
TY_API int ty_active_is_bf16(int level, int dtype);

// cores: int32[threads], where each thread but the first, the caller's, is to stay; null to leave that to the system.
TY_API void *ty_pool_new(int threads, const int32_t *cores);
TY_API void ty_pool_free(void *pool);

TY_API void *ty_attention_new(void *pool, int level, int dtype, int heads, int kv_heads, int head_dim);
TY_API int ty_attention_prepare(void *attention, const ty_step *step, const int32_t *windows, int count);
TY_API int ty_attention_run(void *attention, const ty_attention *job);
TY_API void ty_attention_free(void *attention);

TY_API void *ty_model_new(void *pool, int level, const ty_config *config);
// Say, before ty_model_place, that a product's weights come in parts, each in a format and with so many outputs. expert:
// -1 where the product is not one of an expert. 1: parts cannot end there (ty_part_multiple), and nothing was done.
TY_API int ty_model_parts(void *model, int layer, int which, int expert, int count, const int32_t *formats,
                          const int64_t *outputs);
// Say in which order a product's packed weights take their inputs: int32[inputs], the input that comes first, and so on.
TY_API void ty_model_order(void *model, int layer, int which, int expert, const int32_t *order);
// Bytes of all weights of products, as they lie in memory.
TY_API int64_t ty_model_measure(void *model);
// Where they lie: in so many bytes that begin with a cache line and outlive the model, or, for null, in memory of its own.
TY_API int ty_model_place(void *model, void *memory);
// Lay out weights [outputs, inputs] of a part; null where the memory has them already. bias: float[outputs] or null. See
// ty_model_parts.
TY_API void ty_model_linear(void *model, int layer, int which, int expert, int part, const void *weights,
                            const float *bias);
// The embedding, [vocabulary, hidden] in the format of the config, which must outlive the model. Without one the weights of
// the head, in one part that is neither int8 nor fp8, are the embedding too.
TY_API void ty_model_embedding(void *model, const void *table);
// TY_Q_NORM, TY_K_NORM: float[head_dim]; TY_SINKS: float[heads], see Attending; the other norms: float[hidden]. See
// Convolving, Recurring and Gating of the vectors from TY_CONV to TY_MIXER_NORM. TY_SHARED_GATE: float[hidden], the gate
// of the shared expert, which has none where this is not set.
TY_API void ty_model_vector(void *model, int layer, int which, const float *numbers);
// Room for `slots` adapters of ranks up to `rank`, once for a model; returns the bytes that each takes, -1 where memory ran out.
TY_API int64_t ty_model_slots(void *model, int slots, int64_t rank);
// What the adapter in a slot, from 0, adds to a product: (x * a^T) * b^T. a: stored[parts, rank, inputs], where the parts
// are q, k and v or gate and up or the whole product; b: stored[outputs, rank]. Copied. rank 0: nothing.
TY_API void ty_model_adapter(void *model, int slot, int layer, int which, int64_t rank, const void *a, const void *b);
// 2: a token id is none of the vocabulary; nothing was done.
TY_API int ty_model_step(void *model, const ty_step *step);
TY_API int ty_model_logits(void *model, const int64_t *tokens, int64_t count, float *logits);
TY_API int ty_model_residual(void *model, const int64_t *tokens, int64_t count, float *residual);
// Compute the states of rows again, without anything else: of the tokens kept in `states`, whose rows and runs say how many of
// them.
TY_API int ty_model_replay(void *model, const ty_states *states);
TY_API void ty_model_free(void *model);

// A layer of experts by itself. x: active[rows, hidden], out: float[rows, hidden]. which, expert: see Experts::linear.
TY_API void *ty_experts_new(void *pool, int level, const ty_experts *config);
TY_API void ty_experts_linear(void *experts, int which, int expert, const void *weights, const float *bias);
TY_API int ty_experts_run(void *experts, const void *x, int64_t rows, float *out);
TY_API void ty_experts_free(void *experts);

// A drawer of tokens from rows of logits with so many numbers each. rows: int64[count], the row of each draw. top_k:
// int64[count], the vocabulary for all. uniforms: from 0 to below 1.
TY_API void *ty_drawer_new(void *pool, int level, int64_t vocabulary);
TY_API int ty_drawer_run(void *drawer, const float *logits, int64_t vocabulary, int64_t count, const int64_t *rows,
                         const int64_t *top_k, const double *uniforms, const float *temperatures, const float *top_p,
                         const float *min_p, int64_t *tokens);
TY_API void ty_drawer_free(void *drawer);

// A product by itself: y = x * weights^T + bias, float32 out, of weights in parts; see ty_model_parts. gated: silu of the
// first half of the outputs times the second half, as active numbers. x: active[rows, inputs].
TY_API int ty_part_multiple(int level);  // outputs of all parts but the last are a multiple of it
TY_API void *ty_linear_new(void *pool, int level, int dtype, int64_t inputs, int gated, int count,
                           const int32_t *formats, const int64_t *outputs);
TY_API void ty_linear_set(void *linear, int part, const void *weights, const float *bias);
TY_API int ty_linear_run(void *linear, const void *x, int64_t rows, void *y);
TY_API void ty_linear_free(void *linear);
// x: float[rows, size] of the rows `ids` of a table in a packed format.
TY_API void ty_unpack_rows(int format, const void *table, const int64_t *ids, int64_t rows, int64_t size, float *x);

#ifdef TY_PROFILE
// Seconds of each phase since the last call, in the order of Phase in profile.h.
TY_API void ty_profile(double *seconds);
#endif
