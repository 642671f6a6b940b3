// Whole operations, shared out among the threads of a pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace ty {

constexpr int64_t TOKENS_OF_TASK = 16;  // tokens of a task that does something to each by itself
constexpr int64_t TASKS_OF_THREAD = 8;

// Rows that a task of a product takes, of so many: all if they are few.
constexpr int64_t rows_of_task(int64_t rows) { return rows <= 48 ? most(rows, 1) : 96; }

// Outputs of a product that have one format, from its panel `first` on. The memory of the panels belongs to someone else.
struct LinearPart {
    const PanelKernels *kernels;
    int64_t outputs;
    int64_t first = 0, count = 0;
    char *panels = nullptr;
};

// Weights laid out for products; `gated` ones, of one part, are a gate's and then, as many, those that it is multiplied
// with.
struct Linear {
    std::vector<LinearPart> parts;
    int64_t inputs = 0, outputs = 0;
    bool gated = false;
    std::vector<float> bias;
    std::vector<int32_t> order;  // of the inputs in blocks, empty where they are in order

    // Say what all outputs are.
    void set_whole(const PanelKernels &kernels) { parts = {{&kernels, outputs}}; }
    // How many panels there are: an even number, as panels are multiplied with two at a time at least.
    int64_t count(int width) const {
        return gated ? 2 * ceil_div(outputs / 2, width) : 2 * ceil_div(outputs, 2 * width);
    }
};

// Whether outputs can be divided so: all parts but the last begin and end with a pair of panels.
bool can_divide(const std::vector<LinearPart> &parts, bool gated, int width);
// Count the panels of weights whose parts are known. Returns how many bytes they take, one after the other.
int64_t measure_linears(const std::vector<Linear *> &linears, int width);
// Give them memory of so many bytes, which begins with a cache line.
void place_linears(const std::vector<Linear *> &linears, char *memory);
// Lay out the weights [outputs, inputs] of a part, null where the memory has them already. bias: float[outputs] or null.
void pack(Pool &pool, int width, Linear &linear, size_t part, const void *weights, const float *bias);

// Rows in each form that some product takes.
struct Inputs {
    const void *x[ROW_FORMS] = {};
    int64_t ldx[ROW_FORMS] = {};  // see Product
    const float *row_scales = nullptr;
};

// Bytes from one row to the next in a form.
int64_t row_stride(RowForm form, const TypedKernels &kernels, int64_t size);

// Rounds rows of active numbers to bytes where products take them so.
class RoundedRows {
  public:
    // The rows in each form that the parts of a product take; valid until the next call.
    const Inputs &round(Pool &pool, const TypedKernels &kernels, const Linear &linear, const void *x, int64_t rows);

  private:
    void round(Pool &pool, const TypedKernels &kernels, RowForm form, const Linear &linear, const void *x, int64_t rows);

    Inputs inputs_;
    Block bytes_, scales_, blocks_, ordered_;
};

// Fill in what a product takes from its weights, all of which are of one part.
void take_weights(Product &job, const Linear &linear, const LinearPart &part, const Inputs &inputs);
// Compute `rows` rows of a product; `job` says where they go.
void run_product(Pool &pool, int width, const Linear &linear, const Inputs &inputs, const Product &job, int64_t rows);
void run_norm(Pool &pool, const TypedKernels &kernels, const float *x, const float *weight, void *out, int64_t rows,
              int64_t size, float eps);
// x += norm of found
void run_add_norm(Pool &pool, const TypedKernels &kernels, const float *found, const float *weight, float *x,
                  int64_t rows, int64_t size, float eps);
void run_soften(Pool &pool, const Kernels &kernels, float *x, int64_t count, float cap);
void run_place(Pool &pool, const KvKernels &kernels, const Placing &job, int64_t tokens);

// Draws tokens, with working space for each thread.
class Drawer {
  public:
    Drawer(Pool &pool, const Kernels &kernels, int64_t vocabulary);

    void run(const Drawing &job, const std::vector<Draw> &draws, int64_t *tokens);

  private:
    Pool &pool_;
    const Kernels &kernels_;
    const int64_t floats_;
    Block space_;
};

// The rows of a step: row r has counts[r] tokens, the first at position starts[r], which is token 0 of the step for
// row 0, and so on. pool_rows: int64[tokens], the row of the page table that each token belongs to. fixed_order: what a
// query attends to is summed in the same order whatever other queries its row has, as a decode in `fixed_order` does.
struct Rows {
    int64_t rows;
    const int64_t *starts, *counts, *pool_rows;
    const int32_t *page_table;
    int64_t page_table_stride;
    int32_t page_size;
    bool fixed_order;
};

// Attention of a step's rows in a layer after another; a layer's window decides what is prepared for it.
class Attention {
  public:
    // kv_format: one of TY_KV_STORED and so on.
    Attention(Pool &pool, const TypedKernels &kernels, int kv_format, int heads, int kv_heads, int head_dim);

    // Work out the tasks of a step. The page table must stay as it is until the last layer is done.
    void prepare(const Rows &rows, const std::vector<int> &windows);
    // Attend in one layer; q, keys, values, out and window of the job are read.
    void run(const Attending &job);

  private:
    struct RowTasks {
        Part first;      // its first part
        int64_t count;   // number of parts
        int64_t splits;  // head ranges that each part is cut into
        int64_t step;    // positions from one part to the next
        bool whole;      // one task computes all parts of a head range and joins them
    };
    struct PartTask {
        Part part;
        int64_t row;    // in RowTasks
        int64_t split;
    };
    struct PackTask {
        Packing packing;
        int kv_head;
        int64_t block;
    };
    struct Tasks {
        int window = 0;
        std::vector<RowTasks> rows;
        std::vector<PartTask> parts;
        std::vector<PackTask> packs;
        std::vector<Chunk> chunks;
        std::unique_ptr<std::atomic<int64_t>[]> left;  // parts to come, by row and split
        Block partials, packed;
    };

    void plan_parts(Tasks &tasks, const Rows &rows, const std::vector<const int32_t *> &slots);
    void plan_chunks(Tasks &tasks, const Rows &rows, const std::vector<const int32_t *> &slots);
    bool is_chunk(int64_t queries) const;
    void add_row(Tasks &tasks, const Part &first, bool fixed_order, bool whole) const;
    int64_t stride(const RowTasks &row) const;
    void attend(Tasks &tasks, const Attending &job, int64_t i, int thread);

    Pool &pool_;
    const TypedKernels &kernels_;
    const KvKernels &kv_;
    const int heads_, kv_heads_, head_dim_;
    const bool scaled_;  // numbers of the pool are bytes with scales
    std::vector<Tasks> tasks_;  // by window
    Block slots_, spaces_;
    int64_t space_bytes_ = 0;
};

}  // namespace ty
