#include "experts.h"

#include <cstring>

namespace ty {

namespace {

// Rows that are computed at once: with so many, experts are bound by multiplying, and not by being read.
constexpr int64_t MOST_ROWS = 1024;

}  // namespace

ExpertFacts facts_of(const ty_experts &config) {
    const Epilogue gates[] = {SILU, GELU, CLAMPED};
    return {config.hidden, config.inter, config.count, config.active,
            config.normed != 0, config.int8 != 0, gates[config.gate], config.gate_limit};
}

void Experts::shape(const TypedKernels &kernels, const ExpertFacts &facts) {
    const PanelKernels &of_experts = kernels.formats[facts.int8 ? TY_INT8 : TY_STORED];
    router.inputs = facts.hidden;
    router.outputs = facts.count;
    router.set_whole(kernels.formats[TY_STORED]);
    gate_up.resize((size_t)facts.count);
    down.resize((size_t)facts.count);
    for (size_t e = 0; e < gate_up.size(); e++) {
        gate_up[e].inputs = down[e].outputs = facts.hidden;
        gate_up[e].outputs = 2 * facts.inter;
        gate_up[e].gated = true;
        down[e].inputs = facts.inter;
        gate_up[e].set_whole(of_experts);
        down[e].set_whole(of_experts);
    }
}

std::vector<Linear *> Experts::linears() {
    std::vector<Linear *> found = {&router};
    for (size_t e = 0; e < gate_up.size(); e++) {
        found.push_back(&gate_up[e]);
        found.push_back(&down[e]);
    }
    return found;
}

Linear &Experts::linear(int which, int expert) {
    return which == TY_ROUTER ? router : which == TY_GATE_UP ? gate_up[(size_t)expert] : down[(size_t)expert];
}

ExpertRows::ExpertRows(Pool &pool, const TypedKernels &kernels, int width, const ExpertFacts &facts)
    : pool_(pool), kernels_(kernels), width_(width), facts_(facts), active_bytes_(kernels.active_is_bf16 ? 2 : 4) {}

void ExpertRows::run(const Experts &layer, const void *x, int64_t rows, float *out, bool adding) {
    for (int64_t row = 0; row < rows; row += MOST_ROWS)
        run_some(layer, (const char *)x + row * facts_.hidden * active_bytes_, least(MOST_ROWS, rows - row),
                 out + row * facts_.hidden, adding);
}

void ExpertRows::run_some(const Experts &layer, const void *x, int64_t rows, float *out, bool adding) {
    const int64_t hidden = facts_.hidden, inter = facts_.inter, count = rows * facts_.active;
    route(layer, x, rows);
    sort(rows);
    Product up = {};
    up.epilogue = facts_.gate;
    up.limit = facts_.limit;
    up.y = gated_.get((size_t)(count * inter * active_bytes_));
    up.ldy = inter;
    multiply(layer.gate_up, gather(layer.gate_up[0], x, rows), up);
    Product down = {};
    down.epilogue = STORE;
    down.y = found_.get_of<float>(count * hidden);
    down.ldy = hidden;
    multiply(layer.down, rounded_.round(pool_, kernels_, layer.down[0], up.y, count), down);
    const Mixing mixing = {(const float *)down.y, places_.data(), (const float *)weights_.get(0),
                           facts_.active, hidden, adding, out};
    pool_.run(ceil_div(rows, TOKENS_OF_TASK), [&](int64_t i, int) {
        kernels_.mix(mixing, i * TOKENS_OF_TASK, least(rows, (i + 1) * TOKENS_OF_TASK));
    });
}

void ExpertRows::route(const Experts &layer, const void *x, int64_t rows) {
    const Linear &router = layer.router;
    float *logits = logits_.get_of<float>(rows * facts_.count);
    Product job = {};
    job.y = logits;
    job.ldy = facts_.count;
    run_product(pool_, width_, router, rounded_.round(pool_, kernels_, router, x, rows), job, rows);
    const Routing routing = {logits, facts_.count, facts_.active, facts_.normed,
                             chosen_.get_of<int32_t>(rows * facts_.active),
                             weights_.get_of<float>(rows * facts_.active)};
    pool_.run(ceil_div(rows, TOKENS_OF_TASK), [&](int64_t i, int) {
        kernels_.route(routing, i * TOKENS_OF_TASK, least(rows, (i + 1) * TOKENS_OF_TASK));
    });
}

void ExpertRows::sort(int64_t rows) {
    const int64_t count = rows * facts_.active;
    const int32_t *chosen = (const int32_t *)chosen_.get(0);
    ends_.assign((size_t)facts_.count, 0);
    for (int64_t i = 0; i < count; i++)
        ends_[(size_t)chosen[i]]++;
    runs_.clear();
    int64_t begin = 0;
    for (int64_t e = 0; e < facts_.count; e++) {
        const int64_t end = begin + ends_[(size_t)e];
        if (end > begin)
            runs_.push_back({e, begin, end});
        ends_[(size_t)e] = begin;
        begin = end;
    }
    places_.resize((size_t)count);
    sources_.resize((size_t)count);
    for (int64_t i = 0; i < count; i++) {
        const int64_t place = ends_[(size_t)chosen[i]]++;
        places_[(size_t)i] = (int32_t)place;
        sources_[(size_t)place] = (int32_t)(i / facts_.active);
    }
}

Inputs ExpertRows::gather(const Linear &linear, const void *x, int64_t rows) {
    const int64_t count = rows * facts_.active;
    Inputs inputs = rounded_.round(pool_, kernels_, linear, x, rows);
    const RowForm form = linear.parts[0].kernels->form;
    const int64_t stride = row_stride(form, kernels_, facts_.hidden);
    const char *from = (const char *)inputs.x[form];
    const float *scales = inputs.row_scales;
    float *own_scales = scales ? scales_.get_of<float>(count) : nullptr;
    char *to = gathered_.get_of<char>(count * stride);
    pool_.run(ceil_div(count, TOKENS_OF_TASK), [&](int64_t i, int) {
        for (int64_t place = i * TOKENS_OF_TASK; place < least(count, (i + 1) * TOKENS_OF_TASK); place++) {
            const int64_t row = sources_[(size_t)place];
            memcpy(to + place * stride, from + row * stride, (size_t)stride);
            if (scales)
                own_scales[place] = scales[row];
        }
    });
    inputs.x[form] = to;
    inputs.row_scales = own_scales;
    return inputs;
}

void ExpertRows::multiply(const std::vector<Linear> &linears, const Inputs &inputs, const Product &job) {
    const int64_t panels = linears[0].count(width_), pairs = panels / 2;
    // Experts differ in rows and are few in a small batch, so that each is cut into some groups of panels.
    const int64_t wanted = 2 * TASKS_OF_THREAD * pool_.threads();
    const int64_t groups = least(pairs, most(2, ceil_div(wanted, (int64_t)runs_.size())));
    tasks_.clear();
    for (const Run &run : runs_)
        for (int64_t group = 0; group < groups; group++) {
            const int64_t height = rows_of_task(run.end - run.begin);
            for (int64_t row = run.begin; row < run.end; row += height)
                tasks_.push_back({run.expert, row, least(run.end, row + height), pairs * group / groups * 2,
                                  pairs * (group + 1) / groups * 2});
        }
    pool_.run((int64_t)tasks_.size(), [&](int64_t i, int) {
        const Task &task = tasks_[(size_t)i];
        const Linear &linear = linears[(size_t)task.expert];
        Product own = job;
        const LinearPart &part = linear.parts[0];
        take_weights(own, linear, part, inputs);
        part.kernels->product(own, task.row_begin, task.row_end, task.panel_begin, task.panel_end);
    });
}

}  // namespace ty
