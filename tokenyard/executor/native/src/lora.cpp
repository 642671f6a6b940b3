#include "lora.h"

#include <algorithm>

namespace ty {

namespace {

constexpr int64_t ROWS_OF_TASK = 32;  // of one adapter, that a task of a shrink takes
constexpr int64_t LINE_BYTES = 64;

}  // namespace

void AdaptedRows::set(const int32_t *slots, int64_t rows) {
    groups_.clear();
    used_.clear();
    slots_ = slots;
    if (!slots)
        return;
    counts_.assign((size_t)*std::max_element(slots, slots + rows) + 1, 0);
    for (int64_t r = 0; r < rows; r++)
        counts_[(size_t)slots[r]]++;
    int64_t begin = 0;
    for (size_t slot = 1; slot < counts_.size(); slot++) {
        const int64_t end = begin + counts_[slot];
        if (end > begin) {
            groups_.push_back({(int32_t)slot, begin, end});
            used_.push_back((int32_t)slot);
        }
        counts_[slot] = begin;
        begin = end;
    }
    order_.resize((size_t)begin);
    for (int64_t r = 0; r < rows; r++)
        if (slots[r])
            order_[(size_t)counts_[(size_t)slots[r]]++] = (int32_t)r;
}

ProductSlots::ProductSlots(const TypedKernels &kernels, int width, const Linear &linear,
                           const std::vector<int64_t> &parts)
    : kernels_(kernels), stored_(kernels.formats[TY_STORED]), width_(width), inputs_(linear.inputs), begins_{0} {
    for (int64_t part : parts)
        begins_.push_back(begins_.back() + part);
    const int64_t panels = linear.count(width), half = linear.outputs / 2;
    int64_t before = 0;
    for (int64_t panel = 0; panel < panels; panel++) {
        // Panels of gate and up take turns.
        const int64_t begin = linear.gated ? panel % 2 * half + panel / 2 * width_ : panel * width_;
        const int64_t end = least(begin + width_, linear.gated ? panel % 2 * half + half : linear.outputs);
        PanelParts own = {0, 0, before};
        for (int64_t part = 0; part < (int64_t)parts.size(); part++)
            if (begin < end && begin < begins_[(size_t)part + 1] && end > begins_[(size_t)part]) {
                own.first = own.count ? own.first : part;
                own.count++;
            }
        before += own.count;
        panels_.push_back(own);
        bounds_.push_back({begin, end});
    }
}

int64_t ProductSlots::a_bytes(int64_t rank) const {
    return round_up(parts() * ceil_div(rank, width_) * stored_.panel_bytes(inputs_), LINE_BYTES);
}

int64_t ProductSlots::slot_bytes(int64_t rank) const {
    const int64_t panels = panels_.back().before + panels_.back().count;
    return a_bytes(rank) + round_up(panels * stored_.panel_bytes(round_up(rank, 2)), LINE_BYTES);
}

void ProductSlots::reserve(char *memory, int slots, int64_t rank) {
    for (int slot = 0; slot < slots; slot++, memory += slot_bytes(rank))
        slots_.push_back({0, memory, memory + a_bytes(rank)});
}

void ProductSlots::put(Pool &pool, int slot, int64_t rank, const void *a, const void *b) {
    Change &change = slots_[(size_t)slot];
    change.rank = round_up(rank, 2);
    if (!rank)
        return;
    const int64_t of_part = ceil_div(rank, width_), of_a = parts() * of_part;
    const int64_t panel_bytes = stored_.panel_bytes(inputs_);
    pool.run(of_a + (int64_t)panels_.size(), [&](int64_t i, int) {
        if (i >= of_a)
            return pack_b(i - of_a, change, rank, b);
        const int64_t first = i % of_part * width_;
        const char *from = (const char *)a + (i / of_part * rank + first) * stored_.row_bytes(inputs_);
        kernels_.pack_lanes(from, inputs_, 0, least(width_, rank - first), inputs_, inputs_,
                            (char *)change.a + i * panel_bytes);
    });
}

void ProductSlots::pack_b(int64_t panel, const Change &change, int64_t rank, const void *b) const {
    const PanelParts &own = panels_[(size_t)panel];
    const auto [begin, end] = bounds_[(size_t)panel];
    const int64_t bytes = stored_.panel_bytes(change.rank);
    for (int64_t i = 0; i < own.count; i++) {
        const size_t part = (size_t)(own.first + i);
        const int64_t from = most(begin, begins_[part]), to = least(end, begins_[part + 1]);
        kernels_.pack_lanes((const char *)b + from * stored_.row_bytes(rank), rank, from - begin, to - from, rank,
                            change.rank, (char *)change.b + (own.before + i) * bytes);
    }
}

const char *ProductSlots::panel_of(const Task &task) const {
    return (const char *)slots_[(size_t)task.slot - 1].a + task.panel * stored_.panel_bytes(inputs_);
}

Changes ProductSlots::shrink(Pool &pool, const AdaptedRows &rows, const void *x, int64_t count, Block &inner) {
    int64_t most_rank = 0;
    tasks_.clear();
    for (const AdaptedRows::Group &group : rows.groups()) {
        const int64_t of_part = ceil_div(slots_[(size_t)group.slot - 1].rank, width_);
        most_rank = most(most_rank, of_part * width_);
        // Tasks that follow each other read the same weights.
        for (int64_t panel = 0; panel < parts() * of_part; panel++)
            for (int64_t row = group.begin; row < group.end; row += ROWS_OF_TASK)
                tasks_.push_back({group.slot, rows.rows(group) + (row - group.begin),
                                  least(ROWS_OF_TASK, group.end - row), panel});
    }
    if (tasks_.empty())
        return {};
    const int64_t active_bytes = kernels_.active_is_bf16 ? 2 : 4, ldi = parts() * most_rank;
    char *out = inner.get_of<char>(count * ldi * active_bytes);
    pool.run((int64_t)tasks_.size(), [&](int64_t i, int) {
        const Task &task = tasks_[(size_t)i];
        // What the product reads comes after the last panel.
        const bool last = i + 1 == (int64_t)tasks_.size();
        const void *next = last ? slots_[(size_t)task.slot - 1].b : panel_of(tasks_[(size_t)i + 1]);
        kernels_.shrink({x, inputs_, inputs_, task.rows, task.count, panel_of(task), next,
                         out + task.panel * width_ * active_bytes, ldi});
    });
    return {rows.slots(), rows.used().data(), (int64_t)rows.used().size(), slots_.data(), panels_.data(), out, ldi};
}

}  // namespace ty
