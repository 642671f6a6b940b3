#include "recurrent.h"

#include <cmath>

#include "ops.h"

namespace ty {

RecurrentRows::RecurrentRows(Pool &pool, const Kernels &all, const TypedKernels &kernels, const ty_recurrent &facts,
                             float eps)
    : pool_(pool), all_(all), kernels_(kernels), facts_(facts), eps_(eps) {}

std::vector<int64_t> RecurrentRows::input_parts() const {
    if (facts_.kind == TY_DELTA_NET)
        return {facts_.channels, values(), facts_.heads, facts_.heads};
    return {facts_.kind == TY_MAMBA2 ? values() + facts_.channels + facts_.heads : 3 * (int64_t)facts_.channels};
}

int64_t RecurrentRows::inputs() const {
    int64_t sum = 0;
    for (int64_t part : input_parts())
        sum += part;
    return sum;
}

int64_t RecurrentRows::outputs() const { return facts_.kind == TY_SHORT_CONV ? facts_.channels : values(); }

void RecurrentRows::run(const ty_states &states, int64_t layer, const RecurrentVectors &vectors, const float *in,
                        int64_t tokens, void *out) {
    mixed_.get_of<float>(tokens * facts_.channels);
    convolve(states, layer, vectors, in);
    if (facts_.kind != TY_SHORT_CONV)
        recur(states, layer, vectors, in, tokens);
    if (!out)
        return;
    const bool delta = facts_.kind == TY_DELTA_NET;
    // A gate comes after what the convolution takes, but for that of Mamba-2, which is first.
    const float *gate = in + (facts_.kind == TY_MAMBA2 ? 0 : facts_.channels);
    const int64_t part = delta ? facts_.value_dim : outputs() / (facts_.kind == TY_MAMBA2 ? facts_.groups : 1);
    const Gating job = {(float *)mixed_.get(0) + (delta ? facts_.channels - values() : 0), facts_.channels, gate, inputs(),
                        vectors.norm, facts_.kind == TY_MAMBA2, outputs(), part, eps_, out};
    pool_.run(ceil_div(tokens, TOKENS_OF_TASK), [&](int64_t i, int) {
        kernels_.gate_rows(job, i * TOKENS_OF_TASK, least(tokens, (i + 1) * TOKENS_OF_TASK));
    });
}

void RecurrentRows::convolve(const ty_states &states, int64_t layer, const RecurrentVectors &vectors, const float *in) {
    const bool delta = facts_.kind == TY_DELTA_NET, plain = facts_.kind == TY_SHORT_CONV;
    float *mixed = (float *)mixed_.get(0);
    const Convolving job = {in + (facts_.kind == TY_MAMBA2 ? values() : 0), inputs(), plain ? in + 2 * facts_.channels : nullptr,
                            vectors.conv, vectors.conv_bias, facts_.kernel, facts_.channels, !plain,
                            (char *)states.conv + layer * states.conv_bytes, mixed};
    // A task is a head of queries or keys, which is given its length, or some channels.
    const int64_t unit_heads = delta ? 2 * facts_.groups : 0, begin = unit_heads * facts_.key_dim;
    const int64_t tasks = unit_heads + ceil_div(facts_.channels - begin, STATE_COLUMNS);
    const float length = 1.0f / std::sqrt((float)facts_.key_dim);
    pool_.run(states.rows * tasks, [&](int64_t i, int) {
        const int64_t row = i / tasks, task = i % tasks;
        if (task >= unit_heads) {
            const int64_t channel = begin + (task - unit_heads) * STATE_COLUMNS;
            return kernels_.convolve(job, states, row, channel, least(facts_.channels, channel + STATE_COLUMNS));
        }
        const int64_t channel = task * facts_.key_dim;
        int64_t tokens = 0;
        for (int64_t run = states.run_ends[row]; run < states.run_ends[row + 1]; run++)
            tokens += states.counts[run];
        kernels_.convolve(job, states, row, channel, channel + facts_.key_dim);
        all_.unit_heads(mixed + states.firsts[row] * facts_.channels + channel, facts_.channels, tokens, facts_.key_dim,
                        task < facts_.groups ? length : 1.0f);
    });
}

void RecurrentRows::recur(const ty_states &states, int64_t layer, const RecurrentVectors &vectors, const float *in,
                          int64_t tokens) {
    const bool delta = facts_.kind == TY_DELTA_NET;
    const float *last = in + inputs() - facts_.heads;
    const Recurring job = {&facts_, (float *)mixed_.get(0), delta ? facts_.channels - values() : 0, last,
                           delta ? last - facts_.heads : nullptr, inputs(), vectors.decay, vectors.step_bias, vectors.skip,
                           factors_.get_of<float>(tokens * facts_.heads * 2),
                           (float *)((char *)states.recurrent + layer * states.recurrent_bytes)};
    pool_.run(ceil_div(tokens, TOKENS_OF_TASK), [&](int64_t i, int) {
        all_.state_factors(job, i * TOKENS_OF_TASK, least(tokens, (i + 1) * TOKENS_OF_TASK));
    });
    float *space = space_.get_of<float>(state_space(facts_) * pool_.threads());
    const auto compute = delta ? all_.delta : all_.scan;
    pool_.run(states.rows * facts_.heads, [&](int64_t i, int thread) {
        compute(job, states, i / facts_.heads, (int)(i % facts_.heads), space + thread * state_space(facts_));
    });
}

}  // namespace ty
