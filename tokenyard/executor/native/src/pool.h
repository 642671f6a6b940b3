// Threads that share the tasks of one step.
//
// A phase ends when all its tasks are done, not when all threads have arrived: a thread that has lost its core
// delays no other, unless it is in the middle of a task. Between steps the threads sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace ty {

class Pool {
  public:
    // cores: where each thread after the first is to stay, or null to leave that to the system.
    Pool(int threads, const int32_t *cores);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int threads() const { return (int)workers_.size() + 1; }

    // The threads are awake between begin and end.
    void begin();
    void end();

    // Call task(i, thread) for i in 0 .. count - 1, in any order, and return when all are done. Between begin and end.
    template <class Task>
    void run(int64_t count, const Task &task) {
        if (count == 1 || workers_.empty()) {
            for (int64_t i = 0; i < count; i++)
                task(i, 0);
            return;
        }
        run_all(count, [](const void *context, int64_t i, int thread) { (*(const Task *)context)(i, thread); }, &task);
    }

  private:
    typedef void (*Call)(const void *, int64_t, int);

    void run_all(int64_t count, Call call, const void *context);
    void work(int thread);
    bool take(int thread);

    // The phase's number, its number of tasks and the next task, in one word, so that a task is taken from the phase it
    // was read of: 24, 20 and 20 bits.
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    Call call_ = nullptr;
    const void *context_ = nullptr;
    int64_t first_ = 0;
    alignas(64) std::atomic<bool> awake_{false};
    bool closing_ = false;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

// Keeps the threads awake for as long as it lives.
class Awake {
  public:
    explicit Awake(Pool &pool) : pool_(pool) { pool_.begin(); }
    ~Awake() { pool_.end(); }
    Awake(const Awake &) = delete;
    Awake &operator=(const Awake &) = delete;

  private:
    Pool &pool_;
};

}  // namespace ty
