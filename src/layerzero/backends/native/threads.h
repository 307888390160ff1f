// One pool of threads for every kernel, and OpenMP in its place where the module is told so.
//
// Work is taken in pieces, whoever is free, and a result is computed by one thread in one order:
// its bits depend neither on the number of threads nor on which of them did what. A worker that has
// no work looks for some for SPIN and then sleeps, so it takes nothing from torch's own threads; who
// calls does not wait for a worker that still sleeps, and yields its core to one that was stopped.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

namespace lz {

constexpr std::chrono::microseconds SPIN{50};        // longer than a norm between two products
constexpr int64_t PIECES = 4;                   // per thread: one that was interrupted delays little

// Written by whoever calls, read by all that join in.
struct Job {
  void (*run)(void *, int thread);
  void *data;
  int threads;
};

class Pool {
  std::mutex calling, sleeping;
  std::condition_variable awake;
  std::atomic<uint64_t> number{0};              // of the last job
  std::atomic<bool> open{false};                // may a worker still join in?
  std::atomic<int> active{0}, asleep{0};
  int workers = 0;                              // worker w is thread w + 1 of a job
  Job job{};

  static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
  }

  // Waits for `ready`, and gives up after SPIN.
  template <class R> static bool spin(R ready) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    for (;;) {
      for (int i = 0; i < 32; i++) {
        if (ready()) return true;
        relax();
      }
      if (std::chrono::steady_clock::now() > end) return ready();
    }
  }

  // The order of `active` and `open` is the reverse of the caller's, and all are sequentially
  // consistent: either this thread sees that the job is closed, or the caller sees this thread.
  void join_in(int thread) {
    active++;
    if (open && thread < job.threads) job.run(job.data, thread);
    active--;
  }

  void work(int thread) {
    for (uint64_t seen = 0;;) {
      if (!spin([&] { return number != seen; })) {
        std::unique_lock<std::mutex> lock(sleeping);
        asleep++;
        awake.wait(lock, [&] { return number != seen; });
        asleep--;
      }
      seen = number;
      join_in(thread);
    }
  }

  void grow(int wanted) {
#if defined(__unix__) || defined(__APPLE__)
    sigset_t all, before;                       // signals are for the threads of the program
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
#endif
    try {
      for (; workers < wanted; workers++) std::thread([this, thread = workers + 1] { work(thread); }).detach();
    } catch (const std::system_error &) {}      // no more threads: the others do the work
#if defined(__unix__) || defined(__APPLE__)
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
  }

 public:
  // Calls run(data, thread) on this thread and as many others as come in time; each takes pieces
  // of the work until none is left. Another call that comes meanwhile is done by its own thread.
  void run(const Job &what) {
    std::unique_lock<std::mutex> lock(calling, std::try_to_lock);
    if (!lock) return what.run(what.data, 0);
    if (workers < what.threads - 1) grow(what.threads - 1);
    job = what, open = true, number++;
    if (asleep) {
      { std::lock_guard<std::mutex> wait(sleeping); }
      awake.notify_all();
    }
    what.run(what.data, 0);
    open = false;
    while (!spin([&] { return active == 0; })) std::this_thread::yield();
  }
};

// Never destroyed: its threads may outlive every destructor. A child of fork has none of them, and
// gets a new one.
inline std::atomic<Pool *> &pool() {
  static std::atomic<Pool *> one = [] {
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] { pool() = new Pool; });
#endif
    return new Pool;
  }();
  return one;
}

inline std::atomic<bool> &by_openmp() {
  static std::atomic<bool> chosen{false};
  return chosen;
}

// The work of a call, as one compiled loop: every way to share it out below calls that.
struct Range {
  void (*run)(const void *work, int64_t first, int64_t end, int thread);
  const void *work;
  int64_t count;
};

inline void share_range(int threads, const Range &range) {
#ifdef _OPENMP
  if (by_openmp()) {
#pragma omp parallel num_threads(threads)
    {
      const int64_t thread = omp_get_thread_num(), all = omp_get_num_threads();
      range.run(range.work, range.count * thread / all, range.count * (thread + 1) / all, int(thread));
    }
    return;
  }
#endif
  struct Pieces {
    const Range &range;
    int64_t size;
    std::atomic<int64_t> next{0};
  } pieces{range, std::max<int64_t>(1, range.count / (threads * PIECES))};
  pool().load()->run({[](void *data, int thread) {
    Pieces &p = *(Pieces *)data;
    for (int64_t i; (i = p.next.fetch_add(p.size)) < p.range.count;)
      p.range.run(p.range.work, i, std::min(p.range.count, i + p.size), thread);
  }, &pieces, threads});
}

// Calls work(i, thread) for 0 <= i < count on up to `threads` threads; `thread` is below `threads`,
// and no two that run at once have the same.
template <class W> void share(int threads, int64_t count, const W &work) {
  const Range range{[](const void *data, int64_t first, int64_t end, int thread) {
    for (int64_t i = first; i < end; i++) (*(const W *)data)(i, thread);
  }, &work, count};
  if (threads < 2 || count < 2) range.run(&work, 0, count, 0);
  else share_range(threads, range);
}

}  // namespace lz
