#include "model.h"

#include <algorithm>

#include "formats.h"

namespace ty {

namespace {

const TypedKernels &typed_of(const Kernels &kernels, int dtype) {
    return dtype == TY_BF16 ? kernels.bf16_kernels : kernels.float_kernels;
}

}  // namespace

Model::Model(Pool &pool, const Kernels &kernels, const ty_config &config)
    : pool_(pool), all_(kernels), kernels_(typed_of(kernels, config.dtype)), config_(config),
      q_size_((int64_t)config.heads * config.head_dim), kv_size_((int64_t)config.kv_heads * config.head_dim),
      active_bytes_(kernels_.active_is_bf16 ? 2 : 4), layers_((size_t)config.layers),
      attention_(pool, kernels_, config.kv_format, config.heads, config.kv_heads, config.head_dim),
      window_attention_(pool, kernels_, config.kv_format, config.heads, config.kv_heads, config.head_dim) {
    const int64_t hidden = config.hidden, inter = config.inter;
    int64_t places[2] = {0, 0};
    const PanelKernels &format = kernels_.formats[config.int8 ? TY_INT8 : TY_STORED];
    if (config.experts)
        experts_.reset(new ExpertRows(pool, kernels_, kernels.width, facts_of(*config.experts)));
    for (size_t index = 0; index < layers_.size(); index++) {
        Layer &layer = layers_[index];
        layer.window = config.windows[index];
        layer.cos_sin = config.cos_sin[index];
        layer.place = places[layer.window ? 1 : 0]++;
        const bool has_experts = config.experts && config.expert_layers[index];
        if (has_experts)
            layer.experts.shape(kernels_, facts_of(*config.experts));
        const int64_t sizes[4][2] = {
            {hidden, q_size_ + 2 * kv_size_}, {q_size_, hidden}, {hidden, 2 * inter}, {inter, hidden}};
        for (int i = 0; i < (has_experts ? TY_GATE_UP : 4); i++) {
            layer.linears[i].inputs = sizes[i][0];
            layer.linears[i].outputs = sizes[i][1];
            layer.linears[i].gated = i == TY_GATE_UP;
            layer.linears[i].set_whole(format);
        }
    }
    head_.inputs = hidden;
    head_.outputs = config.vocabulary;
    head_.set_whole(format);
}

Linear &Model::linear(int layer, int which, int expert) {
    if (which == TY_HEAD)
        return head_;
    Layer &own = layers_[(size_t)layer];
    return expert < 0 && which != TY_ROUTER ? own.linears[which] : own.experts.linear(which, expert);
}

std::vector<Linear *> Model::linears() {
    std::vector<Linear *> found;
    for (Layer &layer : layers_) {
        for (int i = 0; i < (layer.has_experts() ? TY_GATE_UP : 4); i++)
            found.push_back(&layer.linears[i]);
        if (layer.has_experts())
            for (Linear *one : layer.experts.linears())
                found.push_back(one);
    }
    found.push_back(&head_);
    return found;
}

int64_t Model::measure() { return measure_linears(linears(), all_.width); }

void Model::place(void *memory) {
    const int64_t bytes = measure();
    place_linears(linears(), memory ? (char *)memory : weights_.get_of<char>(bytes));
}

void Model::set_linear(int layer, int which, int expert, int part, const void *weights, const float *bias) {
    Awake awake(pool_);
    pack(pool_, all_.width, linear(layer, which, expert), (size_t)part, weights, bias);
}

void Model::set_vector(int layer, int which, const float *numbers) {
    const bool of_heads = which == TY_Q_NORM || which == TY_K_NORM;
    const int size = which == TY_SINKS ? config_.heads : of_heads ? config_.head_dim : config_.hidden;
    std::vector<float> &own = which == TY_LAST_NORM ? norm_ : layers_[(size_t)layer].vectors[which];
    own.assign(numbers, numbers + size);
}

int64_t Model::reserve_slots(int slots, int64_t rank) {
    const int64_t hidden = config_.hidden, inter = config_.inter;
    const std::vector<int64_t> parts[4] = {{q_size_, kv_size_, kv_size_}, {hidden}, {inter, inter}, {hidden}};
    int64_t bytes = 0;
    for (Layer &layer : layers_) {
        layer.slots.clear();
        for (int i = 0; i < (layer.has_experts() ? TY_GATE_UP : 4); i++) {
            layer.slots.emplace_back(kernels_, all_.width, layer.linears[i], parts[i]);
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
    for (int64_t t = 0; t < step.tokens; t++)
        if (step.token_ids[t] < 0 || step.token_ids[t] >= config_.vocabulary)
            return false;
    reserve(step);
    adapted_.set(step.adapters, step.tokens);
    Awake awake(pool_);
    timed(EMBED, [&] { embed(step.token_ids, step.tokens); });
    timed(PREPARE, [&] { prepare(step); });
    for (int i = 0; i < config_.layers; i++)
        run_layer(i, step);
    if (step.logit_count)
        logits(step.logit_tokens, step.logit_count, step.logits);
    return true;
}

void Model::embed(const int64_t *ids, int64_t tokens) {
    const float scale = config_.embedding_scale;
    if (!embedding_)
        kernels_.embed_panels(head_.parts[0].panels, ids, scale, x_, tokens, config_.hidden);
    else if (config_.embedding_format == TY_STORED)
        kernels_.embed(embedding_, ids, scale, x_, tokens, config_.hidden);
    else
        unpack_rows(config_.embedding_format, embedding_, ids, scale, x_, tokens, config_.hidden);
}

// Get the working space of a step.
void Model::reserve(const ty_step &step) {
    const int64_t tokens = step.tokens, hidden = config_.hidden;
    x_ = residual_.get_of<float>(tokens * hidden);
    normed_.get((size_t)(tokens * hidden * active_bytes_));
    qkv_.get_of<float>(tokens * (q_size_ + 2 * kv_size_));
    q_.get((size_t)(tokens * q_size_ * active_bytes_));
    attended_.get((size_t)(tokens * q_size_ * active_bytes_));
    gated_.get((size_t)(tokens * config_.inter * active_bytes_));
}

// Work out what attention does in each layer: in that of layers with a window by itself where they have a pool of their
// own.
void Model::prepare(const ty_step &step) {
    Rows rows = {step.rows, step.starts, step.counts, step.pool_rows, step.page_table,
                 step.page_table_stride, step.page_size, step.fixed_order != 0};
    std::vector<int> windows[2];
    for (const Layer &layer : layers_)
        windows[step.window_kv && layer.window].push_back(layer.window);
    if (!windows[0].empty())
        attention_.prepare(rows, windows[0]);
    rows.page_table = step.window_table;
    rows.page_table_stride = step.window_table_stride;
    if (!windows[1].empty())
        window_attention_.prepare(rows, windows[1]);
}

Model::Plane Model::plane_of(const Layer &layer, int index, const ty_step &step) const {
    if (step.window_kv && layer.window) {
        char *keys = (char *)step.window_kv + 2 * layer.place * step.window_plane_bytes;
        return {keys, keys + step.window_plane_bytes, step.window_slots};
    }
    char *keys = (char *)step.kv + 2 * (step.window_kv ? layer.place : index) * step.plane_bytes;
    return {keys, keys + step.plane_bytes, step.slots};
}

void Model::multiply(Phase phase, const Linear &linear, const void *x, Epilogue epilogue, void *y, int64_t ldy,
                     int64_t rows, const Changes &changes) {
    Product job = {};
    job.epilogue = epilogue;
    job.y = y;
    job.ldy = ldy;
    job.changes = changes.slots ? &changes : nullptr;
    job.limit = config_.gate_limit;
    const Inputs *inputs = nullptr;
    timed(ROUND, [&] { inputs = &rounded_.round(pool_, kernels_, linear, x, rows); });
    timed(phase, [&] { run_product(pool_, all_.width, linear, *inputs, job, rows); });
}

Changes Model::changes(Layer &layer, int which, const void *x, int64_t rows) {
    Changes found = {};
    if (!adapted_.groups().empty())
        timed(SHRINK, [&] { found = layer.slots[(size_t)which].shrink(pool_, adapted_, x, rows, inner_); });
    return found;
}

void Model::normalise(const float *x, const float *weight, void *out, int64_t rows) {
    timed(NORM, [&] { run_norm(pool_, kernels_, x, weight, out, rows, config_.hidden, config_.eps); });
}

template <class Compute>
void Model::add(const float *norm, int64_t tokens, const Compute &compute) {
    if (!norm)
        return compute(x_, ADD);
    float *found = added_.get_of<float>(tokens * config_.hidden);
    compute(found, STORE);
    timed(NORM, [&] { run_add_norm(pool_, kernels_, found, norm, x_, tokens, config_.hidden, config_.eps); });
}

void Model::run_layer(int index, const ty_step &step) {
    Layer &layer = layers_[(size_t)index];
    const int64_t tokens = step.tokens;
    void *h = normed_.get(0), *attended = attended_.get(0);
    normalise(x_, layer.vector(TY_ATTENTION_NORM), h, tokens);
    multiply(QKV, layer.linears[TY_QKV], h, STORE, qkv_.get(0), q_size_ + 2 * kv_size_, tokens,
             changes(layer, TY_QKV, h, tokens));
    attend(layer, plane_of(layer, index, step), step);
    add(layer.vector(TY_AFTER_ATTENTION), tokens, [&](float *out, Epilogue epilogue) {
        multiply(OUTPUT, layer.linears[TY_OUTPUT], attended, epilogue, out, config_.hidden, tokens,
                 changes(layer, TY_OUTPUT, attended, tokens));
    });
    run_mlp(layer, tokens);
}

void Model::attend(Layer &layer, const Plane &plane, const ty_step &step) {
    void *q = q_.get(0);
    timed(PLACE, [&] {
        run_place(pool_, kernels_.kv[config_.kv_format],
                  {(float *)qkv_.get(0), layer.vector(TY_Q_NORM), layer.vector(TY_K_NORM), config_.eps, layer.cos_sin,
                   step.positions, plane.slots, plane.keys, plane.values, q, config_.heads, config_.kv_heads,
                   config_.head_dim, config_.rotated},
                  step.tokens);
    });
    timed(ATTEND, [&] {
        Attention &attention = step.window_kv && layer.window ? window_attention_ : attention_;
        attention.run({q, plane.keys, plane.values, attended_.get(0), config_.heads, config_.kv_heads,
                       config_.head_dim, layer.window, config_.attention_scale, config_.attention_softcap,
                       layer.vector(TY_SINKS)});
    });
}

void Model::run_mlp(Layer &layer, int64_t tokens) {
    const Epilogue gates[] = {SILU, GELU, CLAMPED};
    void *h = normed_.get(0), *gated = gated_.get(0);
    normalise(x_, layer.vector(TY_MLP_NORM), h, tokens);
    add(layer.vector(TY_AFTER_MLP), tokens, [&](float *out, Epilogue epilogue) {
        if (layer.has_experts())
            return timed(EXPERTS, [&] { experts_->run(layer.experts, h, tokens, out, epilogue == ADD); });
        multiply(GATE_UP, layer.linears[TY_GATE_UP], h, gates[config_.gate], gated, config_.inter, tokens,
                 changes(layer, TY_GATE_UP, h, tokens));
        multiply(DOWN, layer.linears[TY_DOWN], gated, epilogue, out, config_.hidden, tokens,
                 changes(layer, TY_DOWN, gated, tokens));
    });
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
    normalise(x, norm_.data(), h, count);
    multiply(HEAD, head_, h, STORE, out, config_.vocabulary, count);
    if (config_.logit_softcap > 0.0f)
        timed(HEAD, [&] { run_soften(pool_, all_, out, count * config_.vocabulary, config_.logit_softcap); });
}

}  // namespace ty
