// Mixtures of experts: each token goes to the few experts that a router scores best, and takes the sum of what they find
// by weight (Shazeer et al. 2017, arXiv 1701.06538). Only experts that some token chose are read.
#pragma once

#include <vector>

#include "api.h"
#include "ops.h"

namespace ty {

// What all layers of experts of a model share. hidden, inter: numbers between layers, and within one expert. active: of
// `count` experts, those that each token takes. normed: whether their weights sum to one. gate: SILU or what follows it.
struct ExpertFacts {
    int64_t hidden, inter, count, active;
    bool normed, int8;
    Epilogue gate;
    float limit;
};

// The weights of one layer: a router, and gate and up and down of each expert. Their memory belongs to someone else.
struct Experts {
    Linear router;
    std::vector<Linear> gate_up, down;

    // Say what the weights will be: of one part each, and those of all experts alike. The router's stay as they are stored,
    // whatever the others do.
    void shape(const TypedKernels &kernels, const ExpertFacts &facts);
    // All of them, for whoever gives them memory.
    std::vector<Linear *> linears();
    // The one that a TY_ROUTER, TY_GATE_UP or TY_DOWN names; expert: of the latter two.
    Linear &linear(int which, int expert);
};

ExpertFacts facts_of(const ty_experts &config);

// Computes layers of experts over the rows of a step, with working space for one layer at a time.
class ExpertRows {
  public:
    ExpertRows(Pool &pool, const TypedKernels &kernels, int width, const ExpertFacts &facts);

    // out: float[rows, hidden], overwritten or added to. x: active[rows, hidden]. A row's result depends on it alone.
    void run(const Experts &layer, const void *x, int64_t rows, float *out, bool adding);

  private:
    // Rows of one expert, begin .. end - 1 where rows are sorted by expert.
    struct Run {
        int64_t expert, begin, end;
    };
    struct Task {
        int64_t expert, row_begin, row_end, panel_begin, panel_end;
    };

    // As many rows as there is working space for.
    void run_some(const Experts &layer, const void *x, int64_t rows, float *out, bool adding);
    // Which experts each row takes, and with which weights.
    void route(const Experts &layer, const void *x, int64_t rows);
    // The places of rows where they are sorted by expert, and the runs of these.
    void sort(int64_t rows);
    // Rows of x in the form that a product takes, sorted.
    Inputs gather(const Linear &linear, const void *x, int64_t rows);
    // Multiply each run by its expert's weights.
    void multiply(const std::vector<Linear> &linears, const Inputs &inputs, const Product &job);

    Pool &pool_;
    const TypedKernels &kernels_;
    const int width_;
    const ExpertFacts facts_;
    const int64_t active_bytes_;
    std::vector<int64_t> ends_;
    std::vector<int32_t> places_, sources_;
    std::vector<Run> runs_;
    std::vector<Task> tasks_;
    RoundedRows rounded_;
    Block logits_, chosen_, weights_, gathered_, scales_, gated_, found_;
};

}  // namespace ty
