#include "api.h"

#include <new>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "experts.h"
#include "formats.h"
#include "model.h"
#include "ops.h"

namespace {

enum { PLAIN, AVX2, AVX512, AVX512_BF16, NEON, LEVELS };

bool cpu_has(int level) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    // All that have AVX2 have F16C, whose name not every clang knows.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    switch (level) {
    case AVX2: return avx2;
    case AVX512: return avx512;
    case AVX512_BF16:
        return avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    default: return level == PLAIN;
    }
#elif defined(__aarch64__) && defined(__linux__)
    return level == PLAIN || (level == NEON && (getauxval(AT_HWCAP) & HWCAP_ASIMDDP));
#elif defined(__aarch64__) && defined(__APPLE__)
    return level == PLAIN || level == NEON;  // all of Apple's have them
#else
    return level == PLAIN;
#endif
}

const ty::Kernels *kernels_of(int level) {
    if (!cpu_has(level))
        return nullptr;
    switch (level) {
    case PLAIN: return ty::plain_kernels();
    case AVX2: return ty::avx2_kernels();
    case AVX512: return ty::avx512_kernels();
    case AVX512_BF16: return ty::avx512_bf16_kernels();
    case NEON: return ty::neon_kernels();
    default: return nullptr;
    }
}

const ty::TypedKernels &typed_of(int level, int dtype) {
    const ty::Kernels *kernels = kernels_of(level);
    return dtype == TY_BF16 ? kernels->bf16_kernels : kernels->float_kernels;
}

// Nothing may be thrown through the C interface; the only thing that is thrown inside is a lack of memory.
template <class Call>
int guarded(const Call &call) {
    try {
        call();
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

struct AloneAttention {
    ty::Pool &pool;
    ty::Attention attention;
};

struct AloneExperts {
    ty::Pool &pool;
    const int width;
    ty::Experts layer;
    ty::ExpertRows rows;
    ty::Block memory;

    AloneExperts(ty::Pool &of, int level, const ty_experts &config)
        : pool(of), width(kernels_of(level)->width),
          rows(of, typed_of(level, config.dtype), width, ty::facts_of(config)) {
        layer.shape(typed_of(level, config.dtype), ty::facts_of(config));
        ty::place_linears(layer.linears(), memory.get_of<char>(ty::measure_linears(layer.linears(), width)));
    }
};

struct AloneLinear {
    ty::Pool &pool;
    const ty::TypedKernels &kernels;
    const int width;
    ty::Linear linear;
    ty::RoundedRows rounded;
    ty::Block memory;
};

// False, with nothing done, where the parts cannot be multiplied with.
bool set_parts(ty::Linear &linear, const ty::TypedKernels &kernels, int width, int count, const int32_t *formats,
               const int64_t *outputs) {
    std::vector<ty::LinearPart> parts;
    for (int i = 0; i < count; i++)
        parts.push_back({&kernels.formats[formats[i]], outputs[i]});
    if (!ty::can_divide(parts, linear.gated, width))
        return false;
    linear.parts = parts;
    return true;
}

struct AloneDrawer {
    ty::Pool &pool;
    ty::Drawer drawer;
};

ty::Pool &pool_of(void *pool) { return *(ty::Pool *)pool; }

}  // namespace

int64_t ty_size_of(int which) {
    const int64_t sizes[] = {sizeof(ty_config), sizeof(ty_step), sizeof(ty_attention), sizeof(ty_experts),
                             sizeof(ty_recurrent), sizeof(ty_states)};
    return sizes[which];
}

int ty_best_level(void) {
    int level = LEVELS - 1;
    while (!kernels_of(level))
        level--;
    return level;
}

const char *ty_level_name(int level) {
    const ty::Kernels *kernels = kernels_of(level);
    return kernels ? kernels->name : nullptr;
}

const char *ty_packed_instructions(int level) { return kernels_of(level)->block_instructions; }

int ty_active_is_bf16(int level, int dtype) { return typed_of(level, dtype).active_is_bf16; }

void *ty_pool_new(int threads, const int32_t *cores) { return new ty::Pool(threads, cores); }

void ty_pool_free(void *pool) { delete (ty::Pool *)pool; }

void *ty_attention_new(void *pool, int level, int dtype, int heads, int kv_heads, int head_dim) {
    return new AloneAttention{pool_of(pool), {pool_of(pool), typed_of(level, dtype), TY_KV_STORED, heads, kv_heads, head_dim}};
}

int ty_attention_prepare(void *attention, const ty_step *step, const int32_t *windows, int count) {
    return guarded([&] {
        ((AloneAttention *)attention)
            ->attention.prepare({step->rows, step->starts, step->counts, step->pool_rows, step->page_table,
                                 step->page_table_stride, step->page_size, step->fixed_order != 0},
                                std::vector<int>(windows, windows + count));
    });
}

int ty_attention_run(void *attention, const ty_attention *job) {
    return guarded([&] {
        AloneAttention *alone = (AloneAttention *)attention;
        ty::Awake awake(alone->pool);
        alone->attention.run({job->q, job->keys, job->values, job->out, job->heads, job->kv_heads, job->head_dim,
                              job->window, job->scale, job->softcap, job->sinks});
    });
}

void ty_attention_free(void *attention) { delete (AloneAttention *)attention; }

void *ty_model_new(void *pool, int level, const ty_config *config) {
    void *made = nullptr;
    guarded([&] { made = new ty::Model(pool_of(pool), *kernels_of(level), *config); });
    return made;
}

int ty_model_parts(void *model, int layer, int which, int expert, int count, const int32_t *formats,
                   const int64_t *outputs) {
    ty::Model *own = (ty::Model *)model;
    return !set_parts(own->linear(layer, which, expert), own->kernels(), own->width(), count, formats, outputs);
}

void ty_model_order(void *model, int layer, int which, int expert, const int32_t *order) {
    ty::Linear &linear = ((ty::Model *)model)->linear(layer, which, expert);
    linear.order.assign(order, order + linear.inputs);
}

int64_t ty_model_measure(void *model) { return ((ty::Model *)model)->measure(); }

int ty_model_place(void *model, void *memory) {
    return guarded([&] { ((ty::Model *)model)->place(memory); });
}

void ty_model_linear(void *model, int layer, int which, int expert, int part, const void *weights, const float *bias) {
    ((ty::Model *)model)->set_linear(layer, which, expert, part, weights, bias);
}

void ty_model_embedding(void *model, const void *table) { ((ty::Model *)model)->set_embedding(table); }

void ty_model_vector(void *model, int layer, int which, const float *numbers) {
    ((ty::Model *)model)->set_vector(layer, which, numbers);
}

int64_t ty_model_slots(void *model, int slots, int64_t rank) {
    int64_t bytes = -1;
    guarded([&] { bytes = ((ty::Model *)model)->reserve_slots(slots, rank); });
    return bytes;
}

void ty_model_adapter(void *model, int slot, int layer, int which, int64_t rank, const void *a, const void *b) {
    ((ty::Model *)model)->set_adapter(slot, layer, which, rank, a, b);
}

int ty_model_step(void *model, const ty_step *step) {
    bool done = true;
    const int failed = guarded([&] { done = ((ty::Model *)model)->step(*step); });
    return failed ? failed : done ? 0 : 2;
}

int ty_model_logits(void *model, const int64_t *tokens, int64_t count, float *logits) {
    return guarded([&] { ((ty::Model *)model)->logits_of_last(tokens, count, logits); });
}

int ty_model_residual(void *model, const int64_t *tokens, int64_t count, float *residual) {
    return guarded([&] { ((ty::Model *)model)->residual_of_last(tokens, count, residual); });
}

int ty_model_replay(void *model, const ty_states *states) {
    return guarded([&] { ((ty::Model *)model)->replay(*states); });
}

void ty_model_free(void *model) { delete (ty::Model *)model; }

void *ty_experts_new(void *pool, int level, const ty_experts *config) {
    void *made = nullptr;
    guarded([&] { made = new AloneExperts(pool_of(pool), level, *config); });
    return made;
}

void ty_experts_linear(void *experts, int which, int expert, const void *weights, const float *bias) {
    AloneExperts *alone = (AloneExperts *)experts;
    ty::Awake awake(alone->pool);
    ty::pack(alone->pool, alone->width, alone->layer.linear(which, expert), 0, weights, bias);
}

int ty_experts_run(void *experts, const void *x, int64_t rows, float *out) {
    return guarded([&] {
        AloneExperts *alone = (AloneExperts *)experts;
        ty::Awake awake(alone->pool);
        alone->rows.run(alone->layer, x, rows, out, false);
    });
}

void ty_experts_free(void *experts) { delete (AloneExperts *)experts; }

void *ty_drawer_new(void *pool, int level, int64_t vocabulary) {
    void *made = nullptr;
    guarded([&] { made = new AloneDrawer{pool_of(pool), {pool_of(pool), *kernels_of(level), vocabulary}}; });
    return made;
}

int ty_drawer_run(void *drawer, const float *logits, int64_t vocabulary, int64_t count, const int64_t *rows,
                  const int64_t *top_k, const double *uniforms, const float *temperatures, const float *top_p,
                  const float *min_p, int64_t *tokens) {
    return guarded([&] {
        AloneDrawer *alone = (AloneDrawer *)drawer;
        std::vector<ty::Draw> draws((size_t)count);
        for (int64_t i = 0; i < count; i++)
            draws[(size_t)i] = {rows[i], top_k[i], uniforms[i], temperatures[i], top_p[i], min_p[i]};
        ty::Awake awake(alone->pool);
        alone->drawer.run({logits, vocabulary, vocabulary}, draws, tokens);
    });
}

void ty_drawer_free(void *drawer) { delete (AloneDrawer *)drawer; }

int ty_part_multiple(int level) { return 2 * kernels_of(level)->width; }

void *ty_linear_new(void *pool, int level, int dtype, int64_t inputs, int gated, int count, const int32_t *formats,
                    const int64_t *outputs) {
    AloneLinear *made = nullptr;
    guarded([&] {
        std::unique_ptr<AloneLinear> alone(
            new AloneLinear{pool_of(pool), typed_of(level, dtype), kernels_of(level)->width, {}, {}, {}});
        alone->linear.inputs = inputs;
        alone->linear.gated = gated != 0;
        for (int i = 0; i < count; i++)
            alone->linear.outputs += outputs[i];
        if (!set_parts(alone->linear, alone->kernels, alone->width, count, formats, outputs))
            return;
        const int64_t bytes = ty::measure_linears({&alone->linear}, alone->width);
        ty::place_linears({&alone->linear}, alone->memory.get_of<char>(bytes));
        made = alone.release();
    });
    return made;
}

void ty_linear_set(void *linear, int part, const void *weights, const float *bias) {
    AloneLinear *alone = (AloneLinear *)linear;
    ty::Awake awake(alone->pool);
    ty::pack(alone->pool, alone->width, alone->linear, (size_t)part, weights, bias);
}

int ty_linear_run(void *linear, const void *x, int64_t rows, void *y) {
    return guarded([&] {
        AloneLinear *alone = (AloneLinear *)linear;
        const ty::Linear &own = alone->linear;
        ty::Awake awake(alone->pool);
        ty::Product job = {};
        job.epilogue = own.gated ? ty::SILU : ty::STORE;
        job.y = y;
        job.ldy = own.gated ? own.outputs / 2 : own.outputs;
        const ty::Inputs &inputs = alone->rounded.round(alone->pool, alone->kernels, own, x, rows);
        ty::run_product(alone->pool, alone->width, own, inputs, job, rows);
    });
}

void ty_linear_free(void *linear) { delete (AloneLinear *)linear; }

void ty_unpack_rows(int format, const void *table, const int64_t *ids, int64_t rows, int64_t size, float *x) {
    ty::unpack_rows(format, table, ids, 1.0f, x, rows, size);
}

#ifdef TY_PROFILE
void ty_profile(double *seconds) {
    for (double &phase : ty::phase_seconds) {
        *seconds++ = phase;
        phase = 0.0;
    }
}
#endif
