// A pool of threads for parallel loops of a few microseconds.
//
// Path: every loop of layer.hpp and sample.hpp -> here. Loops hand out their tasks one by one from
// a ticket, so a thread that the system took away delays only the task it holds. Between loops the
// threads spin for a moment, because the next loop of a forward is microseconds away, then sleep.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace qd {

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }

  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true);
    }
    awake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // body(task) for each task in 0..tasks, on all threads; returns when all are done.
  template <class Body>
  void run(int tasks, const Body& body) {
    for (int first = 0; first < tasks; first += MOST_TASKS) {
      const int count = tasks - first < MOST_TASKS ? tasks - first : MOST_TASKS;
      if (workers_.empty() || count == 1) {
        for (int task = 0; task < count; ++task) body(first + task);
      } else {
        share(first, count, body);
      }
    }
  }

 private:
  static constexpr int MOST_TASKS = 0xFFFF;
  static constexpr int SPINS = 4000;  // about 100 us on a 3.6 GHz Zen 4

  // What a ticket says: generation (32 bits), number of tasks (16), next task (16).
  static uint64_t generation_of(uint64_t ticket) { return ticket >> 32; }
  static int count_of(uint64_t ticket) { return static_cast<int>((ticket >> 16) & 0xFFFF); }
  static int next_of(uint64_t ticket) { return static_cast<int>(ticket & 0xFFFF); }

  template <class Body>
  void share(int first, int count, const Body& body) {
    invoke_ = [](const void* any, int task) { (*static_cast<const Body*>(any))(task); };
    body_ = &body;
    first_ = first;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t generation =
        (generation_of(ticket_.load(std::memory_order_relaxed)) + 1) & 0xFFFFFFFFu;
    ticket_.store(generation << 32 | static_cast<uint64_t>(count)
                                         << 16);  // publishes what is above
    if (sleepers_.load() > 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      awake_.notify_all();
    }
    take_tasks();
    for (int spin = 0; done_.load(std::memory_order_acquire) < count; ++spin) {
      _mm_pause();
      if (spin > SPINS) std::this_thread::yield();  // the one that is late may need this core
    }
  }

  // Takes tasks until none is left. A claimed task keeps its loop alive, so body_ is safe to read.
  void take_tasks() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (next_of(ticket) < count_of(ticket)) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      invoke_(body_, first_ + next_of(ticket));
      done_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void work() {
    uint64_t seen = 0;
    while (!stopping_.load(std::memory_order_relaxed)) {
      const uint64_t ticket = ticket_.load(std::memory_order_acquire);
      if (generation_of(ticket) == generation_of(seen)) {
        wait_for_another(ticket);
        continue;
      }
      seen = ticket;
      take_tasks();
    }
  }

  void wait_for_another(uint64_t ticket) {
    for (int spin = 0; spin < SPINS; ++spin) {
      if (ticket_.load(std::memory_order_acquire) != ticket) return;
      _mm_pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    awake_.wait(lock, [&] {
      return stopping_.load() || generation_of(ticket_.load()) != generation_of(ticket);
    });
    sleepers_.fetch_sub(1);
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable awake_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> done_{0};
  void (*invoke_)(const void*, int) = nullptr;
  const void* body_ = nullptr;
  int first_ = 0;
};

}  // namespace qd
