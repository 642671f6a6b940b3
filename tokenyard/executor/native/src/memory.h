// Memory for weights and working space. Large blocks ask the system for huge pages: weights are read once a step from
// end to end, and slots of the pool lie anywhere, so that small pages cost a table walk for every few lines.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ty {

// Ask for huge pages under the whole ones inside [memory, memory + bytes); does nothing where the system has none.
void advise_huge(void *memory, size_t bytes);

// Uninitialised memory that grows and never shrinks, aligned to a cache line. Throws std::bad_alloc.
class Block {
  public:
    Block() = default;
    ~Block();
    Block(const Block &) = delete;
    Block &operator=(const Block &) = delete;

    // At least `bytes` bytes; what was in them is lost if they have to grow.
    void *get(size_t bytes);
    template <class T>
    T *get_of(int64_t count) {
        return (T *)get((size_t)count * sizeof(T));
    }

  private:
    void *memory_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace ty
