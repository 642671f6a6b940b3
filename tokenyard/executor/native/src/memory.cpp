#include "memory.h"

#include <stdlib.h>

#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace ty {

namespace {

constexpr size_t HUGE_BYTES = (size_t)2 << 20;
constexpr size_t LINE_BYTES = 64;

}  // namespace

void advise_huge(void *memory, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t begin = ((uintptr_t)memory + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    const uintptr_t end = ((uintptr_t)memory + bytes) / HUGE_BYTES * HUGE_BYTES;
    if (begin < end)
        madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)memory;
    (void)bytes;
#endif
}

Block::~Block() { free(memory_); }

void *Block::get(size_t bytes) {
    if (bytes <= bytes_ && memory_)
        return memory_;
    free(memory_);
    memory_ = nullptr;
    bytes_ = 0;
    // Some room to spare: contexts grow by a token a step.
    size_t wanted = bytes + bytes / 4 + LINE_BYTES;
    const size_t unit = wanted >= 2 * HUGE_BYTES ? HUGE_BYTES : LINE_BYTES;
    wanted = (wanted + unit - 1) / unit * unit;
    if (posix_memalign(&memory_, unit, wanted)) {
        memory_ = nullptr;
        throw std::bad_alloc();
    }
    advise_huge(memory_, wanted);
    bytes_ = wanted;
    return memory_;
}

}  // namespace ty
