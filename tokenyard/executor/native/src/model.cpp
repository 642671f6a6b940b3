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
      qkv_size_(2 * kv_size_ + (config.output_gate ? 2 : 1) * q_size_), active_bytes_(kernels_.active_is_bf16 ? 2 : 4), layers_((size_t)config.layers),
      attention_(pool, kernels_, config.kv_format, config.heads, config.kv_heads, config.head_dim),
      window_attention_(pool, kernels_, config.kv_format, config.heads, config.kv_heads, config.head_dim) {
    const int64_t hidden = config.hidden, inter = config.inter;
    int64_t places[2] = {0, 0}, kv_places[2] = {0, 0};
    const PanelKernels &format = kernels_.formats[config.int8 ? TY_INT8 : TY_STORED];
    if (config.experts)
        experts_.reset(new ExpertRows(pool, kernels_, kernels.width, facts_of(*config.experts)));
    if (config.recurrent)
        recurrent_.reset(new RecurrentRows(pool, all_, kernels_, *config.recurrent, config.eps));
    for (size_t index = 0; index < layers_.size(); index++) {
        Layer &layer = layers_[index];
        layer.window = config.windows[index];
        layer.cos_sin = config.cos_sin[index];
        layer.recurrent = config.recurrent && config.recurrent_layers[index];
        layer.kv_place = kv_places[layer.recurrent]++;
        if (!layer.recurrent)
            layer.place = places[layer.window ? 1 : 0]++;
        const bool has_experts = config.experts && config.expert_layers[index];
        if (has_experts)
            layer.experts.shape(kernels_, facts_of(*config.experts));
        layer.adapted = has_experts ? TY_GATE_UP : 4;
        layer.linear_count = has_experts && !config.shared ? TY_GATE_UP : 4;
        const int64_t own = has_experts ? config.shared : inter;
        const int64_t sizes[4][2] = {{hidden, layer.recurrent ? recurrent_->inputs() : qkv_size_},
                                     {layer.recurrent ? recurrent_->outputs() : q_size_, hidden},
                                     {hidden, 2 * own},
                                     {own, hidden}};
        for (int i = 0; i < layer.linear_count; i++) {
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
        for (int i = 0; i < layer.linear_count; i++)
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
    std::vector<float> &own = which == TY_LAST_NORM ? norm_ : layers_[(size_t)layer].vectors[which];
    own.assign(numbers, numbers + vector_size(which));
}

int64_t Model::vector_size(int which) const {
    const ty_recurrent none = {}, &states = recurrent_ ? recurrent_->facts() : none;
    switch (which) {
    case TY_SINKS: return config_.heads;
    case TY_Q_NORM:
    case TY_K_NORM: return config_.head_dim;
    case TY_CONV: return (int64_t)states.kernel * states.channels;
    case TY_CONV_BIAS: return states.channels;
    case TY_DECAY:
    case TY_STEP_BIAS:
    case TY_SKIP: return states.heads;
    case TY_MIXER_NORM: return (int64_t)states.value_dim * (states.kind == TY_MAMBA2 ? states.heads : 1);
    default: return config_.hidden;
    }
}

int64_t Model::reserve_slots(int slots, int64_t rank) {
    const int64_t hidden = config_.hidden, inter = config_.inter;
    std::vector<int64_t> parts[4] = {{}, {hidden}, {inter, inter}, {hidden}}, qkv = {q_size_, kv_size_, kv_size_};
    if (config_.output_gate)
        qkv.push_back(q_size_);
    int64_t bytes = 0;
    for (Layer &layer : layers_) {
        layer.slots.clear();
        parts[TY_QKV] = layer.recurrent ? recurrent_->input_parts() : qkv;
        for (int i = 0; i < layer.adapted; i++) {
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
        head_.parts[0].kernels->embed_panels(head_.parts[0].panels, ids, scale, x_, tokens, config_.hidden);
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
    qkv_.get_of<float>(tokens * most(qkv_size_, recurrent_ ? recurrent_->inputs() : 0));
    q_.get((size_t)(tokens * q_size_ * active_bytes_));
    attended_.get((size_t)(tokens * most(q_size_, recurrent_ ? recurrent_->outputs() : 0) * active_bytes_));
    gated_.get((size_t)(tokens * most(config_.inter, config_.shared) * active_bytes_));
}

// Work out what attention does in each layer: in that of layers with a window by itself where they have a pool of their
// own.
void Model::prepare(const ty_step &step) {
    Rows rows = {step.rows, step.starts, step.counts, step.pool_rows, step.page_table,
                 step.page_table_stride, step.page_size, step.fixed_order != 0};
    std::vector<int> windows[2];
    for (const Layer &layer : layers_)
        if (!layer.recurrent)
            windows[step.window_kv && layer.window].push_back(layer.window);
    if (!windows[0].empty())
        attention_.prepare(rows, windows[0]);
    rows.page_table = step.window_table;
    rows.page_table_stride = step.window_table_stride;
    if (!windows[1].empty())
        window_attention_.prepare(rows, windows[1]);
}

Model::Plane Model::plane_of(const Layer &layer, const ty_step &step) const {
    if (step.window_kv && layer.window) {
        char *keys = (char *)step.window_kv + 2 * layer.place * step.window_plane_bytes;
        return {keys, keys + step.window_plane_bytes, step.window_slots};
    }
    char *keys = (char *)step.kv + 2 * (step.window_kv ? layer.place : layer.kv_place) * step.plane_bytes;
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
    if (!norm && config_.residual_scale == 1.0f)
        return compute(x_, ADD);
    float *found = added_.get_of<float>(tokens * config_.hidden);
    compute(found, STORE);
    if (!norm)
        return timed(NORM, [&] { all_.add_scaled(found, config_.residual_scale, x_, tokens * config_.hidden); });
    timed(NORM, [&] { run_add_norm(pool_, kernels_, found, norm, x_, tokens, config_.hidden, config_.eps); });
}

void Model::run_layer(int index, const ty_step &step) {
    Layer &layer = layers_[(size_t)index];
    const int64_t tokens = step.tokens;
    void *h = normed_.get(0), *attended = attended_.get(0);
    normalise(x_, layer.vector(TY_ATTENTION_NORM), h, tokens);
    const Linear &first = layer.linears[TY_QKV];
    multiply(QKV, first, h, STORE, qkv_.get(0), first.outputs, tokens, changes(layer, TY_QKV, h, tokens));
    if (layer.recurrent)
        recur(layer, step);
    else
        attend(layer, step);
    add(layer.vector(TY_AFTER_ATTENTION), tokens, [&](float *out, Epilogue epilogue) {
        multiply(OUTPUT, layer.linears[TY_OUTPUT], attended, epilogue, out, config_.hidden, tokens,
                 changes(layer, TY_OUTPUT, attended, tokens));
    });
    run_mlp(layer, tokens);
}

RecurrentVectors Model::recurrent_vectors(const Layer &layer) const {
    return {layer.vector(TY_CONV), layer.vector(TY_CONV_BIAS), layer.vector(TY_DECAY),
            layer.vector(TY_STEP_BIAS), layer.vector(TY_SKIP), layer.vector(TY_MIXER_NORM)};
}

void Model::recur(Layer &layer, const ty_step &step) {
    const ty_states &states = *step.states;
    const float *in = (const float *)qkv_.get(0);
    const int64_t size = recurrent_->inputs();
    timed(RECUR, [&] {
        float *kept = states.kept + layer.kv_place * states.kept_tokens * size;
        for (int64_t row = 0; row < states.rows && states.kept_tokens; row++) {
            int64_t token = states.firsts[row];
            for (int64_t run = states.run_ends[row]; run < states.run_ends[row + 1]; token += states.counts[run++])
                if (states.target_ends[run] == states.target_ends[run + 1])
                    kept = std::copy_n(in + token * size, states.counts[run] * size, kept);
        }
        recurrent_->run(states, layer.kv_place, recurrent_vectors(layer), in, step.tokens, attended_.get(0));
    });
}

void Model::replay(const ty_states &states) {
    Awake awake(pool_);
    for (const Layer &layer : layers_)
        if (layer.recurrent)
            recurrent_->run(states, layer.kv_place, recurrent_vectors(layer),
                            states.kept + layer.kv_place * states.kept_tokens * recurrent_->inputs(), states.kept_tokens,
                            nullptr);
}

void Model::attend(Layer &layer, const ty_step &step) {
    const Plane plane = plane_of(layer, step);
    void *q = q_.get(0);
    timed(PLACE, [&] {
        run_place(pool_, kernels_.kv[config_.kv_format],
                  {(float *)qkv_.get(0), layer.vector(TY_Q_NORM), layer.vector(TY_K_NORM), config_.eps, layer.cos_sin,
                   step.positions, plane.slots, plane.keys, plane.values, q, config_.heads, config_.kv_heads,
                   config_.head_dim, config_.rotated, qkv_size_},
                  step.tokens);
    });
    timed(ATTEND, [&] {
        Attention &attention = step.window_kv && layer.window ? window_attention_ : attention_;
        attention.run({q, plane.keys, plane.values, attended_.get(0), config_.heads, config_.kv_heads,
                       config_.head_dim, layer.window, config_.attention_scale, config_.attention_softcap,
                       layer.vector(TY_SINKS)});
        if (!config_.output_gate)
            return;
        const float *gate = (const float *)qkv_.get(0) + qkv_size_ - q_size_;
        pool_.run(ceil_div(step.tokens, TOKENS_OF_TASK), [&](int64_t i, int) {
            kernels_.gate_attended(attended_.get(0), gate, qkv_size_, q_size_, i * TOKENS_OF_TASK,
                                   least(step.tokens, (i + 1) * TOKENS_OF_TASK));
        });
    });
}

void Model::run_mlp(Layer &layer, int64_t tokens) {
    const Epilogue gates[] = {SILU, GELU, CLAMPED};
    void *h = normed_.get(0), *gated = gated_.get(0);
    normalise(x_, layer.vector(TY_MLP_NORM), h, tokens);
    add(layer.vector(TY_AFTER_MLP), tokens, [&](float *out, Epilogue epilogue) {
        const int64_t inter = layer.has_experts() ? config_.shared : config_.inter;
        if (layer.has_experts()) {
            timed(EXPERTS, [&] { experts_->run(layer.experts, h, tokens, out, epilogue == ADD); });
            if (!inter)
                return;
            epilogue = ADD;
        }
        const auto adapted = [&](int which, const void *x) {
            return which < layer.adapted ? changes(layer, which, x, tokens) : Changes{};
        };
        multiply(GATE_UP, layer.linears[TY_GATE_UP], h, gates[config_.gate], gated, inter, tokens, adapted(TY_GATE_UP, h));
        if (const float *gate = layer.vector(TY_SHARED_GATE))
            timed(EXPERTS, [&] { kernels_.gate_shared(gated, inter, h, gate, config_.hidden, 0, tokens); });
        multiply(DOWN, layer.linears[TY_DOWN], gated, epilogue, out, config_.hidden, tokens, adapted(TY_DOWN, gated));
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
    if (config_.logit_scale != 1.0f)
        timed(HEAD, [&] { all_.scale(out, config_.logit_scale, out, count * config_.vocabulary); });
    if (config_.logit_softcap > 0.0f)
        timed(HEAD, [&] { run_soften(pool_, all_, out, count * config_.vocabulary, config_.logit_softcap); });
}

}  // namespace ty
