#include "pool.h"

#include <algorithm>
#include <system_error>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace ty {

namespace {

constexpr int COUNT_BITS = 20;
constexpr uint64_t COUNT_MASK = (1ull << COUNT_BITS) - 1;
constexpr int64_t MOST_TASKS = 1 << 19;  // leaves room for every thread to take one number too many
constexpr int SPINS = 2000;

uint64_t next_of(uint64_t state) { return state & COUNT_MASK; }
uint64_t count_of(uint64_t state) { return (state >> COUNT_BITS) & COUNT_MASK; }

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Wait a moment: at first without leaving the core, then by letting others have it.
void wait(int &spins) {
    if (++spins < SPINS)
        pause();
    else
        std::this_thread::yield();
}

void stay_on(std::thread &thread, int32_t core) {
#ifdef __linux__
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET((size_t)core, &cores);
    // A core that is not there or not ours changes nothing.
    pthread_setaffinity_np(thread.native_handle(), sizeof cores, &cores);
#else
    (void)thread;
    (void)core;
#endif
}

}  // namespace

Pool::Pool(int threads, const int32_t *cores) {
    workers_.reserve((size_t)std::max(0, threads - 1));
    try {
        for (int i = 1; i < threads; i++) {
            workers_.emplace_back([this, i] { work(i); });
            if (cores)
                stay_on(workers_.back(), cores[i]);
        }
    } catch (const std::system_error &) {
        // The system gives no more threads: those that are there do the work.
    }
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    wake_.notify_all();
    for (std::thread &worker : workers_)
        worker.join();
}

void Pool::begin() {
    if (workers_.empty())
        return;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        awake_.store(true, std::memory_order_release);
    }
    wake_.notify_all();
}

void Pool::end() {
    std::lock_guard<std::mutex> lock(mutex_);
    awake_.store(false, std::memory_order_release);
}

void Pool::run_all(int64_t count, Call call, const void *context) {
    for (int64_t begin = 0; begin < count; begin += MOST_TASKS) {
        const int64_t some = std::min(MOST_TASKS, count - begin);
        // No thread reads these while no task is open.
        call_ = call;
        context_ = context;
        first_ = begin;
        done_.store(0, std::memory_order_relaxed);
        const uint64_t phase = (state_.load(std::memory_order_relaxed) >> (2 * COUNT_BITS)) + 1;
        state_.store((phase << (2 * COUNT_BITS)) | ((uint64_t)some << COUNT_BITS), std::memory_order_release);
        while (take(0)) {
        }
        int spins = 0;
        while (done_.load(std::memory_order_acquire) != some)
            wait(spins);
    }
}

bool Pool::take(int thread) {
    uint64_t state = state_.load(std::memory_order_acquire);
    if (next_of(state) >= count_of(state))
        return false;
    state = state_.fetch_add(1, std::memory_order_acq_rel);
    // Another thread may have been faster; the phase may even be a later one, whose task this is then.
    if (next_of(state) >= count_of(state))
        return false;
    call_(context_, first_ + (int64_t)next_of(state), thread);
    done_.fetch_add(1, std::memory_order_release);
    return true;
}

void Pool::work(int thread) {
    for (;;) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [this] { return closing_ || awake_.load(std::memory_order_relaxed); });
            if (closing_)
                return;
        }
        int spins = 0;
        while (awake_.load(std::memory_order_acquire)) {
            if (take(thread))
                spins = 0;
            else
                wait(spins);
        }
    }
}

}  // namespace ty
