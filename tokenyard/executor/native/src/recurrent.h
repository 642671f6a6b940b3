// Layers with a recurrent state in the place of attention: what is between their two products.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace ty {

// Vectors of one layer; see ty_model_vector. Null where it has none.
struct RecurrentVectors {
    const float *conv, *conv_bias, *decay, *step_bias, *skip, *norm;
};

// Computes such layers over the rows of a step, with working space for one layer at a time.
class RecurrentRows {
  public:
    RecurrentRows(Pool &pool, const Kernels &all, const TypedKernels &kernels, const ty_recurrent &facts, float eps);

    const ty_recurrent &facts() const { return facts_; }
    // Numbers that the first product gives, and the second takes, for a token.
    int64_t inputs() const;
    int64_t outputs() const;
    // The same in the parts that adapters know (LoRA).
    std::vector<int64_t> input_parts() const;
    // Advance the rows' states in layer `layer` of those that have one. in: float[tokens, inputs()]; out: active[tokens,
    // outputs()], null where only the states are wanted.
    void run(const ty_states &states, int64_t layer, const RecurrentVectors &vectors, const float *in, int64_t tokens,
             void *out);

  private:
    void convolve(const ty_states &states, int64_t layer, const RecurrentVectors &vectors, const float *in);
    void recur(const ty_states &states, int64_t layer, const RecurrentVectors &vectors, const float *in, int64_t tokens);

    int64_t values() const { return (int64_t)facts_.heads * facts_.value_dim; }

    Pool &pool_;
    const Kernels &all_;
    const TypedKernels &kernels_;
    const ty_recurrent facts_;
    const float eps_;
    Block mixed_, factors_, space_;
};

}  // namespace ty
