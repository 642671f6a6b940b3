// LoRA adapters in slots: their weights next to those of a product, and which rows of a step have which.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "ops.h"

namespace ty {

// The rows of a step that have adapters, slot by slot.
class AdaptedRows {
  public:
    struct Group {
        int32_t slot;  // from 1
        int64_t begin, end;
    };

    // slots: of each row, from 1, or 0 for none; they must stay as they are while the step runs. Null where no row has an
    // adapter.
    void set(const int32_t *slots, int64_t rows);

    const int32_t *slots() const { return slots_; }
    const std::vector<Group> &groups() const { return groups_; }
    const std::vector<int32_t> &used() const { return used_; }
    const int32_t *rows(const Group &group) const { return order_.data() + group.begin; }

  private:
    const int32_t *slots_ = nullptr;
    std::vector<Group> groups_;
    std::vector<int32_t> order_, used_;
    std::vector<int64_t> counts_;
};

// The slots of one product. A panel of the product may hold outputs of several of its parts (see PanelParts).
class ProductSlots {
  public:
    // parts: outputs of each, in the order in which the product's weights have them.
    ProductSlots(const TypedKernels &kernels, int width, const Linear &linear,
                 const std::vector<int64_t> &parts);

    // Bytes of a slot for ranks up to `rank`.
    int64_t slot_bytes(int64_t rank) const;
    // Begin with empty slots in memory[slots * slot_bytes(rank)], which belongs to someone else.
    void reserve(char *memory, int slots, int64_t rank);
    // a: stored[parts, rank, inputs], b: stored[outputs, rank], copied; rank 0 for an adapter that changes nothing here.
    // slot: from 0.
    void put(Pool &pool, int slot, int64_t rank, const void *a, const void *b);
    // The first half of what adapters add to a step's rows of x: active[rows, inputs]. The second is the product's own.
    // Where no row has an adapter that changes anything, the result's `slots` are null. inner: where the
    // numbers in between go.
    Changes shrink(Pool &pool, const AdaptedRows &rows, const void *x, int64_t count, Block &inner);

  private:
    struct Task {
        int32_t slot;
        const int32_t *rows;
        int64_t count, panel;
    };

    const char *panel_of(const Task &task) const;

    int64_t parts() const { return (int64_t)begins_.size() - 1; }
    int64_t a_bytes(int64_t rank) const;
    void pack_b(int64_t panel, const Change &change, int64_t rank, const void *b) const;

    const TypedKernels &kernels_;
    const PanelKernels &stored_;
    const int64_t width_, inputs_;
    std::vector<int64_t> begins_;  // where parts begin among the outputs, and where the last one ends
    std::vector<PanelParts> panels_;
    std::vector<std::pair<int64_t, int64_t>> bounds_;  // outputs that panels hold
    std::vector<Change> slots_;
    std::vector<Task> tasks_;
};

}  // namespace ty
