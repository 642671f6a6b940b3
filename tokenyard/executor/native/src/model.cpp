#include "model.h"

#include <algorithm>

namespace ty {

namespace {

const TypedKernels &typed_of(const Kernels &kernels, int dtype) {
    return dtype == TY_BF16 ? kernels.bf16_kernels : kernels.float_kernels;
}

}  // namespace

Model::Model(Pool &pool, const Kernels &kernels, const ty_config &config)
    : pool_(pool), all_(kernels), kernels_(typed_of(kernels, config.dtype)), config_(config),
      q_size_((int64_t)config.heads * config.head_dim), kv_size_((int64_t)config.kv_heads * config.head_dim),
      active_bytes_(kernels_.active_is_bf16 ? 2 : 4), windows_(config.windows, config.windows + config.layers),
      layers_((size_t)config.layers), attention_(pool, kernels_, config.heads, config.kv_heads, config.head_dim) {
    const int64_t hidden = config.hidden, inter = config.inter;
    std::vector<Linear *> linears;
    for (Layer &layer : layers_) {
        const int64_t sizes[4][2] = {
            {hidden, q_size_ + 2 * kv_size_}, {q_size_, hidden}, {hidden, 2 * inter}, {inter, hidden}};
        for (int i = 0; i < 4; i++) {
            layer.linears[i].inputs = sizes[i][0];
            layer.linears[i].outputs = sizes[i][1];
            layer.linears[i].gated = i == TY_GATE_UP;
            linears.push_back(&layer.linears[i]);
        }
    }
    head_.inputs = hidden;
    head_.outputs = config.vocabulary;
    linears.push_back(&head_);
    for (Linear *one : linears)
        one->kernels = config.int8 ? &kernels_.as_int8 : &kernels_.as_stored;
    place_linears(linears, all_.width, weights_);
}

Linear &Model::linear(int layer, int which) {
    return which == TY_HEAD ? head_ : layers_[(size_t)layer].linears[which];
}

void Model::set_linear(int layer, int which, const void *weights, const float *bias) {
    Awake awake(pool_);
    pack(pool_, all_.width, stored_bytes(), linear(layer, which), weights, bias);
}

void Model::set_norm(int layer, int which, const float *weight) {
    if (which == TY_LAST_NORM) {
        norm_.assign(weight, weight + config_.hidden);
        return;
    }
    const bool of_heads = which == TY_Q_NORM || which == TY_K_NORM;
    layers_[(size_t)layer].norms[which].assign(weight, weight + (of_heads ? config_.head_dim : config_.hidden));
}

int64_t Model::reserve_slots(int slots, int64_t rank) {
    const int64_t hidden = config_.hidden, inter = config_.inter;
    const std::vector<int64_t> parts[4] = {{q_size_, kv_size_, kv_size_}, {hidden}, {inter, inter}, {hidden}};
    int64_t bytes = 0;
    for (Layer &layer : layers_) {
        layer.slots.clear();
        for (int i = 0; i < 4; i++) {
            layer.slots.emplace_back(kernels_, all_.width, stored_bytes(), layer.linears[i], parts[i]);
            bytes += layer.slots.back().slot_bytes(rank);
        }
    }
    char *memory = adapters_.get_of<char>(bytes * slots);
    for (Layer &layer : layers_)
        for (ProductSlots &one : layer.slots) {
            one.reserve(memory, slots, rank);
            memory += one.slot_bytes(rank) * slots;
        }
    return bytes;
}

void Model::set_adapter(int slot, int layer, int which, int64_t rank, const void *a, const void *b) {
    Awake awake(pool_);
    layers_[(size_t)layer].slots[(size_t)which].put(pool_, slot, rank, a, b);
}

bool Model::step(const ty_step &step) {
    const int64_t tokens = step.tokens, hidden = config_.hidden;
    for (int64_t t = 0; t < tokens; t++)
        if (step.token_ids[t] < 0 || step.token_ids[t] >= config_.vocabulary)
            return false;
    x_ = residual_.get_of<float>(tokens * hidden);
    normed_.get((size_t)(tokens * hidden * active_bytes_));
    qkv_.get_of<float>(tokens * (q_size_ + 2 * kv_size_));
    q_.get((size_t)(tokens * q_size_ * active_bytes_));
    attended_.get((size_t)(tokens * q_size_ * active_bytes_));
    gated_.get((size_t)(tokens * config_.inter * active_bytes_));
    adapted_.set(step.adapters, tokens);
    Awake awake(pool_);
    timed(EMBED, [&] { kernels_.embed(config_.embedding, step.token_ids, x_, tokens, hidden); });
    timed(PREPARE, [&] {
        attention_.prepare({step.rows, step.starts, step.counts, step.pool_rows, step.page_table,
                            step.page_table_stride, step.page_size, step.fixed_order != 0},
                           windows_);
    });
    for (int i = 0; i < config_.layers; i++)
        run_layer(i, step);
    if (step.logit_count)
        logits(step.logit_tokens, step.logit_count, step.logits);
    return true;
}

void Model::multiply(Phase phase, const Linear &linear, const void *x, Epilogue epilogue, void *y, int64_t ldy,
                     int64_t rows, const Changes &changes) {
    Product job = {x, linear.inputs, nullptr, linear.panels, linear.bias.empty() ? nullptr : linear.bias.data(),
                   linear.inputs, linear.outputs, linear.count(all_.width), epilogue, y, ldy,
                   changes.slots ? &changes : nullptr};
    if (config_.int8)
        timed(ROUND, [&] {
            bytes_.round(pool_, kernels_, x, rows, linear.inputs);
            job.x = bytes_.bytes.get(0);
            job.ldx = bytes_.stride;
            job.row_scales = (const float *)bytes_.scales.get(0);
        });
    timed(phase, [&] { run_product(pool_, *linear.kernels, job, rows); });
}

Changes Model::changes(Layer &layer, int which, const void *x, int64_t rows) {
    Changes found = {};
    if (!adapted_.groups().empty())
        timed(SHRINK, [&] { found = layer.slots[(size_t)which].shrink(pool_, adapted_, x, rows, inner_); });
    return found;
}

void Model::normalise(const float *x, const std::vector<float> &weight, void *out, int64_t rows) {
    timed(NORM, [&] { run_norm(pool_, kernels_, x, weight.data(), out, rows, config_.hidden, config_.eps); });
}

void Model::run_layer(int index, const ty_step &step) {
    Layer &layer = layers_[(size_t)index];
    const int64_t tokens = step.tokens, hidden = config_.hidden;
    void *h = normed_.get(0), *q = q_.get(0), *attended = attended_.get(0), *gated = gated_.get(0);
    float *qkv = (float *)qkv_.get(0);
    char *keys = (char *)step.kv + 2 * index * step.plane_bytes, *values = keys + step.plane_bytes;
    const auto of_heads = [&](int which) {
        return layer.norms[which].empty() ? nullptr : layer.norms[which].data();
    };
    normalise(x_, layer.norms[TY_ATTENTION_NORM], h, tokens);
    multiply(QKV, layer.linears[TY_QKV], h, STORE, qkv, q_size_ + 2 * kv_size_, tokens,
             changes(layer, TY_QKV, h, tokens));
    timed(PLACE, [&] {
        run_place(pool_, kernels_,
                  {qkv, of_heads(TY_Q_NORM), of_heads(TY_K_NORM), config_.eps, config_.cos_sin, step.positions,
                   step.slots, keys, values, q, config_.heads, config_.kv_heads, config_.head_dim},
                  tokens);
    });
    timed(ATTEND, [&] {
        attention_.run({q, keys, values, attended, config_.heads, config_.kv_heads, config_.head_dim,
                        windows_[(size_t)index], 1.0f / __builtin_sqrtf((float)config_.head_dim)});
    });
    multiply(OUTPUT, layer.linears[TY_OUTPUT], attended, ADD, x_, hidden, tokens,
             changes(layer, TY_OUTPUT, attended, tokens));
    normalise(x_, layer.norms[TY_MLP_NORM], h, tokens);
    multiply(GATE_UP, layer.linears[TY_GATE_UP], h, SILU, gated, config_.inter, tokens,
             changes(layer, TY_GATE_UP, h, tokens));
    multiply(DOWN, layer.linears[TY_DOWN], gated, ADD, x_, hidden, tokens, changes(layer, TY_DOWN, gated, tokens));
}

void Model::logits_of_last(const int64_t *tokens, int64_t count, float *out) {
    Awake awake(pool_);
    logits(tokens, count, out);
}

void Model::residual_of_last(const int64_t *tokens, int64_t count, float *out) const {
    const int64_t hidden = config_.hidden;
    for (int64_t i = 0; i < count; i++)
        std::copy_n(x_ + tokens[i] * hidden, hidden, out + i * hidden);
}

void Model::logits(const int64_t *tokens, int64_t count, float *out) {
    const int64_t hidden = config_.hidden;
    float *x = few_.get_of<float>(count * hidden);
    void *h = few_normed_.get((size_t)(count * hidden * active_bytes_));
    residual_of_last(tokens, count, x);
    normalise(x, norm_, h, count);
    multiply(HEAD, head_, h, STORE, out, config_.vocabulary, count);
}

}  // namespace ty
