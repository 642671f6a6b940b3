#include "ops.h"

#include <algorithm>
#include <cstring>

#include "formats.h"

namespace ty {

namespace {

constexpr int64_t SMALL = 4096;        // numbers that one thread is done with before others have heard of them
constexpr int64_t PART_KEYS = 512;     // most keys of a part; fixed, so that a row's result depends on the row alone
constexpr int64_t PART_QUERIES = 24;   // most query heads per key head that are attended together by parts
constexpr int64_t MOST_PARTS = 3;      // as many times that are attended by parts of a row
constexpr int64_t CHUNK_ROWS = 96;     // query heads of a chunk
constexpr int64_t LINE_FLOATS = 16;
constexpr int64_t LINE_BYTES = 64;

// Part `i` of a row, of `step` positions.
Part part_of_row(const Part &first, int64_t i, int64_t step, float *partial) {
    Part part = first;
    part.begin = least(first.end, first.begin + i * step);
    part.end = least(first.end, part.begin + step);
    part.partial = partial;
    return part;
}

// to[rows, size] = from[rows, order], of numbers of 2 or 4 bytes.
void put_in_order(const char *from, int64_t rows, int64_t size, int number_bytes, const int32_t *order, char *to) {
    for (int64_t r = 0; r < rows; r++, from += size * number_bytes)
        for (int64_t i = 0; i < size; i++, to += number_bytes)
            memcpy(to, from + order[i] * number_bytes, (size_t)number_bytes);
}

}  // namespace

bool can_divide(const std::vector<LinearPart> &parts, bool gated, int width) {
    for (size_t i = 0; i + 1 < parts.size(); i++)
        if (gated || parts[i].outputs % (2 * width))
            return false;
    return true;
}

int64_t measure_linears(const std::vector<Linear *> &linears, int width) {
    int64_t bytes = 0;
    for (Linear *one : linears) {
        int64_t first = 0;
        for (LinearPart &part : one->parts) {
            part.first = first;
            part.count = one->parts.size() == 1 ? one->count(width) : 2 * ceil_div(part.outputs, 2 * width);
            first += part.count;
            bytes += round_up(part.count * part.kernels->panel_bytes(one->inputs), LINE_BYTES);
        }
    }
    return bytes;
}

void place_linears(const std::vector<Linear *> &linears, char *memory) {
    for (Linear *one : linears)
        for (LinearPart &part : one->parts) {
            part.panels = memory;
            memory += round_up(part.count * part.kernels->panel_bytes(one->inputs), LINE_BYTES);
        }
}

void pack(Pool &pool, int width, Linear &linear, size_t which, const void *weights, const float *bias) {
    const LinearPart &part = linear.parts[which];
    const int64_t halves = linear.gated ? 2 : 1, half = part.outputs / halves;
    const int64_t row_bytes = part.kernels->row_bytes(linear.inputs);
    if (bias)
        linear.bias.resize((size_t)(linear.count(width) * width));
    pool.run(part.count, [&](int64_t panel, int) {
        // Panels of gate and up take turns.
        const int64_t row = panel / halves * width, begin = panel % halves * half + row;
        const int64_t rows = most(0, least(width, half - row));
        const char *from = (const char *)weights + begin * row_bytes;
        if (weights)
            part.kernels->pack_panel(from, rows, linear.inputs, part.panels, panel);
        for (int64_t i = 0; bias && i < rows; i++)
            linear.bias[(size_t)((part.first + panel) * width + i)] = bias[begin + i];
    });
}

int64_t row_stride(RowForm form, const TypedKernels &kernels, int64_t size) {
    if (form == ACTIVE_ROWS)
        return size * (kernels.active_is_bf16 ? 2 : 4);
    return form == BYTE_ROWS ? round_up(size, LINE_BYTES) : block_row_bytes(size);
}

const Inputs &RoundedRows::round(Pool &pool, const TypedKernels &kernels, const Linear &linear, const void *x,
                                 int64_t rows) {
    inputs_ = {};
    for (const LinearPart &part : linear.parts) {
        const RowForm form = part.kernels->form;
        if (inputs_.x[form])
            continue;
        if (form == ACTIVE_ROWS) {
            inputs_.x[form] = x;
            inputs_.ldx[form] = linear.inputs;
        } else {
            round(pool, kernels, form, linear, x, rows);
        }
    }
    return inputs_;
}

void RoundedRows::round(Pool &pool, const TypedKernels &kernels, RowForm form, const Linear &linear, const void *x,
                        int64_t rows) {
    const int64_t size = linear.inputs;
    const int64_t stride = row_stride(form, kernels, size), row_bytes = row_stride(ACTIVE_ROWS, kernels, size);
    char *to = (form == BYTE_ROWS ? bytes_ : blocks_).get_of<char>(rows * stride);
    float *scales = form == BYTE_ROWS ? scales_.get_of<float>(rows) : nullptr;
    inputs_.x[form] = to;
    inputs_.ldx[form] = stride;
    inputs_.row_scales = scales ? scales : inputs_.row_scales;
    const bool ordered = form == BLOCK_ROWS && !linear.order.empty();
    char *const in_order = ordered ? ordered_.get_of<char>(rows * row_bytes) : nullptr;
    const auto some_rows = [&](int64_t row, int64_t some) {
        const char *from = (const char *)x + row * row_bytes;
        if (ordered) {
            put_in_order(from, some, size, (int)(row_bytes / size), linear.order.data(), in_order + row * row_bytes);
            from = in_order + row * row_bytes;
        }
        if (form == BYTE_ROWS)
            kernels.round_rows(from, some, size, (uint8_t *)to + row * stride, stride, scales + row);
        else
            kernels.round_blocks(from, some, size, to + row * stride, stride);
    };
    if (rows * size <= SMALL)
        return some_rows(0, rows);
    pool.run(ceil_div(rows, TOKENS_OF_TASK), [&](int64_t i, int) {
        some_rows(i * TOKENS_OF_TASK, least(TOKENS_OF_TASK, rows - i * TOKENS_OF_TASK));
    });
}

void take_weights(Product &job, const Linear &linear, const LinearPart &part, const Inputs &inputs) {
    const RowForm form = part.kernels->form;
    job.x = inputs.x[form];
    job.ldx = inputs.ldx[form];
    job.row_scales = form == BYTE_ROWS ? inputs.row_scales : nullptr;
    job.weights = part.panels;
    job.first = part.first;
    job.bias = linear.bias.empty() ? nullptr : linear.bias.data();
    job.inputs = linear.inputs;
    job.outputs = linear.outputs;
}

void run_product(Pool &pool, int width, const Linear &linear, const Inputs &inputs, const Product &job, int64_t rows) {
    // As many tasks for each thread, of as many pairs of panels each as can be.
    const int64_t pairs = linear.count(width) / 2, groups = least(pairs, TASKS_OF_THREAD * pool.threads());
    const int64_t height = rows_of_task(rows), heights = ceil_div(rows, height);
    pool.run(groups * heights, [&](int64_t i, int) {
        const int64_t row = i % heights * height, group = i / heights;
        const int64_t begin = pairs * group / groups * 2, end = pairs * (group + 1) / groups * 2;
        for (const LinearPart &part : linear.parts) {
            const int64_t first = most(begin, part.first), last = least(end, part.first + part.count);
            if (first >= last)
                continue;
            Product own = job;
            take_weights(own, linear, part, inputs);
            part.kernels->product(own, row, least(rows, row + height), first, last);
        }
    });
}

void run_norm(Pool &pool, const TypedKernels &kernels, const float *x, const float *weight, void *out, int64_t rows,
              int64_t size, float eps) {
    if (rows * size <= SMALL)
        return kernels.norm(x, weight, out, rows, size, eps);
    const int64_t bytes = kernels.active_is_bf16 ? 2 : 4;
    pool.run(ceil_div(rows, TOKENS_OF_TASK), [&](int64_t i, int) {
        const int64_t row = i * TOKENS_OF_TASK, some = std::min(TOKENS_OF_TASK, rows - row);
        kernels.norm(x + row * size, weight, (char *)out + row * size * bytes, some, size, eps);
    });
}

void run_add_norm(Pool &pool, const TypedKernels &kernels, const float *found, const float *weight, float *x,
                  int64_t rows, int64_t size, float eps) {
    if (rows * size <= SMALL)
        return kernels.add_norm(found, weight, x, rows, size, eps);
    pool.run(ceil_div(rows, TOKENS_OF_TASK), [&](int64_t i, int) {
        const int64_t row = i * TOKENS_OF_TASK, some = least(TOKENS_OF_TASK, rows - row);
        kernels.add_norm(found + row * size, weight, x + row * size, some, size, eps);
    });
}

void run_soften(Pool &pool, const Kernels &kernels, float *x, int64_t count, float cap) {
    pool.run(ceil_div(count, SMALL), [&](int64_t i, int) {
        kernels.soften(x + i * SMALL, least(SMALL, count - i * SMALL), cap);
    });
}

void run_place(Pool &pool, const KvKernels &kernels, const Placing &job, int64_t tokens) {
    if (tokens * (job.heads + 2 * job.kv_heads) * job.head_dim <= SMALL)
        return kernels.place(job, 0, tokens);
    pool.run(ceil_div(tokens, TOKENS_OF_TASK), [&](int64_t i, int) {
        kernels.place(job, i * TOKENS_OF_TASK, std::min(tokens, (i + 1) * TOKENS_OF_TASK));
    });
}

Drawer::Drawer(Pool &pool, const Kernels &kernels, int64_t vocabulary)
    : pool_(pool), kernels_(kernels), floats_(round_up(draw_space(vocabulary), LINE_FLOATS)) {
    space_.get_of<float>(floats_ * pool.threads());
}

void Drawer::run(const Drawing &job, const std::vector<Draw> &draws, int64_t *tokens) {
    float *space = (float *)space_.get(0);
    pool_.run((int64_t)draws.size(), [&](int64_t i, int thread) {
        tokens[i] = kernels_.draw(job, draws[(size_t)i], space + thread * floats_);
    });
}

Attention::Attention(Pool &pool, const TypedKernels &kernels, int kv_format, int heads, int kv_heads, int head_dim)
    : pool_(pool),
      kernels_(kernels),
      kv_(kernels.kv[kv_format]),
      heads_(heads),
      kv_heads_(kv_heads),
      head_dim_(head_dim),
      scaled_(kv_format != TY_KV_STORED) {}

// A row of a few parts' queries reads its keys once for each of them, which is less than to pack them all.
bool Attention::is_chunk(int64_t queries) const { return queries * (heads_ / kv_heads_) > MOST_PARTS * PART_QUERIES; }

void Attention::prepare(const Rows &rows, const std::vector<int> &windows) {
    std::vector<const int32_t *> slots((size_t)rows.rows);
    int64_t all = 0, token = 0;
    for (int64_t r = 0; r < rows.rows; r++)
        all += rows.starts[r] + rows.counts[r];
    int32_t *own = rows.page_size == 1 ? nullptr : slots_.get_of<int32_t>(all);
    for (int64_t r = 0; r < rows.rows; r++) {
        const int64_t end = rows.starts[r] + rows.counts[r];
        const int32_t *pages = rows.page_table + rows.pool_rows[token] * rows.page_table_stride;
        slots[(size_t)r] = own ? own : pages;
        for (int64_t begin = 0, page = 0; own && begin < end; begin += rows.page_size, page++) {
            const int32_t used = (int32_t)least(rows.page_size, end - begin);
            for (int32_t i = 0; i < used; i++)
                own[begin + i] = pages[page] * rows.page_size + i;
        }
        own = own ? own + end : own;
        token += rows.counts[r];
    }
    std::vector<int> wanted(windows);
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    if (tasks_.size() != wanted.size())
        tasks_ = std::vector<Tasks>(wanted.size());
    space_bytes_ = kernels_.chunk_space(head_dim_, (int)most(CHUNK_ROWS, heads_ / kv_heads_));
    for (size_t i = 0; i < wanted.size(); i++) {
        tasks_[i].window = wanted[i];
        plan_parts(tasks_[i], rows, slots);
        plan_chunks(tasks_[i], rows, slots);
    }
    space_bytes_ = round_up(space_bytes_, LINE_BYTES);
    spaces_.get((size_t)(space_bytes_ * pool_.threads()));
}

// Floats between two partials of a row.
int64_t Attention::stride(const RowTasks &row) const {
    return round_up(row.first.queries * (int64_t)heads_ * (head_dim_ + 2), LINE_FLOATS);
}

// Parts of as many keys each; in a fixed order of PART_KEYS each, so that where they begin does not depend on the row's
// last position.
void Attention::add_row(Tasks &tasks, const Part &first, bool fixed_order, bool whole) const {
    const int64_t keys = first.end - first.begin, count = ceil_div(keys, PART_KEYS);
    const int64_t step = fixed_order ? PART_KEYS : round_up(ceil_div(keys, count), MAX_WIDTH);
    tasks.rows.push_back({first, count, 1, step, whole});
}

void Attention::plan_parts(Tasks &tasks, const Rows &rows, const std::vector<const int32_t *> &slots) {
    tasks.rows.clear();
    tasks.parts.clear();
    // Queries with a window begin at different keys, so they share no parts in a fixed order.
    const int64_t together = most(1, PART_QUERIES / (heads_ / kv_heads_));
    const int64_t some = tasks.window && rows.fixed_order ? 1 : together;
    for (int64_t r = 0, token = 0; r < rows.rows; token += rows.counts[r], r++) {
        const bool chunk = is_chunk(rows.counts[r]);
        if (chunk && !rows.fixed_order)
            continue;
        for (int64_t q = 0; q < rows.counts[r]; q += some) {
            const int64_t queries = least(some, rows.counts[r] - q), start = rows.starts[r] + q, end = start + queries;
            const int64_t begin = tasks.window ? most(0, start - tasks.window + 1) : 0;
            const Part first = {slots[(size_t)r], token + q, (int)queries, start, begin, end, 0, kv_heads_, nullptr};
            add_row(tasks, first, rows.fixed_order, chunk);
        }
    }
    int64_t floats = 0, count = 0;
    for (const RowTasks &row : tasks.rows) {
        floats += row.whole ? 0 : row.count * stride(row);
        count += row.whole ? 1 : row.count;
        if (row.whole)
            space_bytes_ = most(space_bytes_, row.count * stride(row) * (int64_t)sizeof(float));
    }
    if (!count)
        return;
    float *partials = tasks.partials.get_of<float>(floats);
    // Parts of few rows are cut by heads too, into as many of each.
    int64_t splits = least(kv_heads_, ceil_div(2 * pool_.threads(), count));
    while (kv_heads_ % splits)
        splits++;
    tasks.left.reset(new std::atomic<int64_t>[tasks.rows.size() * (size_t)splits]);
    for (size_t r = 0; r < tasks.rows.size(); r++) {
        RowTasks &row = tasks.rows[r];
        row.splits = splits;
        row.first.partial = partials;
        for (int64_t i = 0; i < (row.whole ? 1 : row.count); i++)
            for (int64_t s = 0; s < splits; s++) {
                Part part = part_of_row(row.first, i, row.step, partials + i * stride(row));
                part.head_begin = (int)(kv_heads_ * s / splits);
                part.head_end = (int)(kv_heads_ * (s + 1) / splits);
                tasks.parts.push_back({part, (int64_t)r, s});
            }
        partials += row.whole ? 0 : row.count * stride(row);
        for (int64_t s = 0; s < splits; s++)
            tasks.left[r * (size_t)splits + (size_t)s].store(row.count, std::memory_order_relaxed);
    }
    // Threads take parts in order, so a thread's next one is about as many further as there are threads.
    for (size_t i = (size_t)pool_.threads(); i < tasks.parts.size(); i++) {
        tasks.parts[i - (size_t)pool_.threads()].part.next = &tasks.parts[i].part;
        tasks.parts[i].part.prefetched = true;
    }
}

void Attention::plan_chunks(Tasks &tasks, const Rows &rows, const std::vector<const int32_t *> &slots) {
    tasks.packs.clear();
    tasks.chunks.clear();
    if (rows.fixed_order)
        return;
    const int64_t block_bytes = kernels_.packed_block(head_dim_);
    int64_t blocks = 0, token = 0;
    for (int64_t r = 0; r < rows.rows; r++) {
        const int64_t start = rows.starts[r], begin = tasks.window ? most(0, start - tasks.window + 1) : 0;
        if (is_chunk(rows.counts[r]))
            blocks += ceil_div(start + rows.counts[r], KEY_BLOCK) - begin / KEY_BLOCK;
    }
    if (!blocks)
        return;
    char *packed = tasks.packed.get_of<char>(2 * blocks * kv_heads_ * block_bytes);
    const int64_t most_queries = most(1, CHUNK_ROWS / (heads_ / kv_heads_));
    for (int64_t r = 0; r < rows.rows; token += rows.counts[r], r++) {
        if (!is_chunk(rows.counts[r]))
            continue;
        const int64_t start = rows.starts[r], end = start + rows.counts[r];
        const int64_t begin = tasks.window ? most(0, start - tasks.window + 1) : 0, first = begin / KEY_BLOCK;
        const int64_t own = ceil_div(end, KEY_BLOCK) - first;
        for (int h = 0; h < kv_heads_; h++) {
            char *keys = packed, *values = packed + own * block_bytes;
            packed += 2 * own * block_bytes;
            for (int64_t b = first; b < first + own; b++)
                tasks.packs.push_back({{slots[(size_t)r], first, begin, end, keys, values}, h, b});
            for (int64_t q = 0; q < rows.counts[r]; q += most_queries) {
                const int queries = (int)least(most_queries, rows.counts[r] - q);
                tasks.chunks.push_back({keys, values, first, token + q, queries, start + q, h, scaled_, nullptr});
            }
        }
    }
    // The last queries of a row see the most keys: long tasks first.
    std::stable_sort(tasks.chunks.begin(), tasks.chunks.end(),
                     [](const Chunk &a, const Chunk &b) { return a.position > b.position; });
}

void Attention::attend(Tasks &tasks, const Attending &job, int64_t i, int thread) {
    const PartTask &task = tasks.parts[(size_t)i];
    const RowTasks &row = tasks.rows[(size_t)task.row];
    if (row.whole) {
        float *space = (float *)((char *)spaces_.get(0) + thread * space_bytes_);
        Part first = task.part;
        first.partial = space;
        for (int64_t c = 0; c < row.count; c++) {
            Part part = part_of_row(row.first, c, row.step, space + c * stride(row));
            part.head_begin = task.part.head_begin;
            part.head_end = task.part.head_end;
            kv_.attend_part(job, part);
        }
        return kernels_.join_parts(job, first, row.count, stride(row), first.head_begin, first.head_end);
    }
    kv_.attend_part(job, task.part);
    std::atomic<int64_t> &left = tasks.left[(size_t)(task.row * row.splits + task.split)];
    if (left.fetch_sub(1, std::memory_order_acq_rel) != 1)
        return;
    // The last part joins them all, and resets the count for the next layer.
    left.store(row.count, std::memory_order_relaxed);
    kernels_.join_parts(job, row.first, row.count, stride(row), task.part.head_begin, task.part.head_end);
}

void Attention::run(const Attending &job) {
    Tasks *tasks = nullptr;
    for (Tasks &one : tasks_)
        if (one.window == job.window)
            tasks = &one;
    const int64_t parts = (int64_t)tasks->parts.size(), packs = (int64_t)tasks->packs.size();
    if (parts + packs)
        pool_.run(parts + packs, [&](int64_t i, int thread) {
            if (i < parts)
                return attend(*tasks, job, i, thread);
            const PackTask &task = tasks->packs[(size_t)(i - parts)];
            kv_.pack_block(job, task.packing, task.kv_head, task.block);
        });
    if (!tasks->chunks.empty())
        pool_.run((int64_t)tasks->chunks.size(), [&](int64_t i, int thread) {
            Chunk chunk = tasks->chunks[(size_t)i];
            chunk.space = (char *)spaces_.get(0) + thread * space_bytes_;
            kernels_.attend_chunk(job, chunk);
        });
}

}  // namespace ty
