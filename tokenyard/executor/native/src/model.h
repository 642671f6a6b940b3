// A decoder whose steps run from token ids to logits in one call. The shapes and the order of what is computed are those
// of executor/models/decoder.py.
#pragma once

#include <vector>

#include "api.h"
#include "experts.h"
#include "lora.h"
#include "ops.h"
#include "profile.h"
#include "recurrent.h"

namespace ty {

class Model {
  public:
    Model(Pool &pool, const Kernels &kernels, const ty_config &config);

    // A product, whose parts may be changed until place() is called. expert: -1 where it is not one of an expert.
    Linear &linear(int layer, int which, int expert);
    // Bytes of the weights of all products, whose parts do not change any more.
    int64_t measure();
    // Keep them in so many bytes of memory that outlive the model; null for memory of its own.
    void place(void *memory);
    void set_linear(int layer, int which, int expert, int part, const void *weights, const float *bias);
    // Without it the head's weights, which are in one part then, are the embedding.
    void set_embedding(const void *table) { embedding_ = table; }
    void set_vector(int layer, int which, const float *numbers);
    // Room for so many adapters of ranks up to `rank`; called once. Returns the bytes that each takes.
    int64_t reserve_slots(int slots, int64_t rank);
    void set_adapter(int slot, int layer, int which, int64_t rank, const void *a, const void *b);
    // False, with nothing done, if a token id is none of the vocabulary.
    bool step(const ty_step &step);
    // Logits of tokens of the last step: float[count, vocabulary].
    void logits_of_last(const int64_t *tokens, int64_t count, float *out);
    // What the last layer gave for tokens of the last step, before the norm: float[count, hidden].
    void residual_of_last(const int64_t *tokens, int64_t count, float *out) const;

    // Advance states by tokens that were kept; see ty_states.
    void replay(const ty_states &states);

    const TypedKernels &kernels() const { return kernels_; }
    int width() const { return all_.width; }

  private:
    struct Layer {
        Linear linears[4];  // without the last two where there are experts and none is shared
        Experts experts;
        std::vector<float> vectors[TY_LAST_NORM];
        std::vector<ProductSlots> slots;  // of each of `linears`, or none
        int window = 0;
        int64_t place = 0;    // among the layers with a window, or among those without
        int64_t kv_place = 0;  // among those that attend, or among those with a state
        bool recurrent = false;
        int linear_count = 4, adapted = 4;  // of `linears`, those that there are, and that adapters may change
        const float *cos_sin = nullptr;

        bool has_experts() const { return !experts.down.empty(); }
        const float *vector(int which) const { return vectors[which].empty() ? nullptr : vectors[which].data(); }
    };
    // Where a step's keys and values of one layer go.
    struct Plane {
        char *keys, *values;
        const int64_t *slots;
    };

    std::vector<Linear *> linears();
    int64_t vector_size(int which) const;
    void multiply(Phase phase, const Linear &linear, const void *x, Epilogue epilogue, void *y, int64_t ldy,
                  int64_t rows, const Changes &changes = {});
    // What adapters add to a product of a layer.
    Changes changes(Layer &layer, int which, const void *x, int64_t rows);
    void normalise(const float *x, const float *weight, void *out, int64_t rows);
    void logits(const int64_t *tokens, int64_t count, float *out);
    void reserve(const ty_step &step);
    void embed(const int64_t *ids, int64_t tokens);
    void prepare(const ty_step &step);
    Plane plane_of(const Layer &layer, const ty_step &step) const;
    void run_layer(int index, const ty_step &step);
    void attend(Layer &layer, const ty_step &step);
    void recur(Layer &layer, const ty_step &step);
    RecurrentVectors recurrent_vectors(const Layer &layer) const;
    void run_mlp(Layer &layer, int64_t tokens);
    // Let `compute(out, epilogue)` add what a part of the layer finds to the residual stream, behind its own norm if it
    // has one, and scaled.
    template <class Compute>
    void add(const float *norm, int64_t tokens, const Compute &compute);

    Pool &pool_;
    const Kernels &all_;
    const TypedKernels &kernels_;
    const ty_config config_;
    const void *embedding_ = nullptr;
    const int64_t q_size_, kv_size_, qkv_size_, active_bytes_;
    std::vector<Layer> layers_;
    std::vector<float> norm_;
    Linear head_;
    Block weights_, adapters_;
    Attention attention_, window_attention_;
    std::unique_ptr<ExpertRows> experts_;
    std::unique_ptr<RecurrentRows> recurrent_;
    RoundedRows rounded_;
    AdaptedRows adapted_;
    Block residual_, normed_, qkv_, q_, attended_, gated_, few_, few_normed_, inner_, added_;
    float *x_ = nullptr;
};

}  // namespace ty
