// What this CPU can do at most: reading memory, and products in registers. See benchmarks/limits.py.
#include <immintrin.h>
#include <stdint.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

template <class Task>
double best_seconds(int threads, int rounds, const Task &task) {
    double best = 1e9;
    for (int round = 0; round < rounds; round++) {
        const auto begin = std::chrono::steady_clock::now();
        std::vector<std::thread> others;
        for (int i = 1; i < threads; i++)
            others.emplace_back([&, i] { task(i); });
        task(0);
        for (std::thread &other : others)
            other.join();
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return best;
}

volatile uint64_t sink;

void read_all(const char *memory, int64_t bytes) {
    uint64_t sums[8] = {};
    for (int64_t i = 0; i < bytes; i += 256) {
        for (int64_t line = 0; line < 256; line += 64)
            __builtin_prefetch(memory + i + line + 4096);
        for (int64_t line = 0; line < 256; line += 64)
            for (int j = 0; j < 8; j++) {
                uint64_t word;
                memcpy(&word, memory + i + line + j * 8, 8);
                sums[j] ^= word;
            }
    }
    for (uint64_t sum : sums)
        sink = sink ^ sum;
}

}  // namespace

// Bytes per second that `threads` threads read of memory that each has touched first.
extern "C" double read_rate(int threads, int64_t bytes, int rounds) {
    const int64_t own = bytes / threads / 4096 * 4096;
#ifdef __linux__
    char *memory = (char *)mmap(nullptr, own * threads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return 0.0;
    madvise(memory, own * threads, MADV_HUGEPAGE);
#else
    std::vector<char> all(own * threads);
    char *memory = all.data();
#endif
    best_seconds(threads, 1, [&](int i) { memset(memory + i * own, 1, own); });
    const double seconds = best_seconds(threads, rounds, [&](int i) { read_all(memory + i * own, own); });
#ifdef __linux__
    munmap(memory, own * threads);
#endif
    return own * threads / seconds;
}

// Operations (two for each multiply-add) per second in registers: `kind` 0 of float32, 1 of bfloat16, 2 of int8. 0
// where this CPU has no such instruction.
extern "C" double product_rate(int threads, int kind, int64_t steps, int rounds) {
    constexpr int SUMS = 12;
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
    const auto task = [&](int) {
        __m512 sums[SUMS];
        __m512i whole[SUMS], x = _mm512_set1_epi32(0), y = x;
        for (int i = 0; i < SUMS; i++) {
            sums[i] = _mm512_setzero_ps();
            whole[i] = x;
        }
        for (int64_t step = 0; step < steps; step++) {
            for (int i = 0; i < SUMS; i++)
                if (kind == 0)
                    sums[i] = _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(y), sums[i]);
                else if (kind == 1)
                    sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)x, (__m512bh)y);
                else
                    whole[i] = _mm512_dpbusd_epi32(whole[i], x, y);
            asm volatile("" : "+v"(x), "+v"(y));  // no step is like the one before, for all the compiler knows
        }
        for (int i = 1; i < SUMS; i++) {
            sums[0] = _mm512_add_ps(sums[0], sums[i]);
            whole[0] = _mm512_add_epi32(whole[0], whole[i]);
        }
        sink = sink + (uint64_t)(_mm512_reduce_add_ps(sums[0]) + _mm512_reduce_add_epi32(whole[0]));
    };
    const double each[] = {32, 64, 128};
    return each[kind] * SUMS * steps * threads / best_seconds(threads, rounds, task);
#else
    return 0.0;
#endif
}
