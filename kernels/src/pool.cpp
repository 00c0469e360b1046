#include "pool.h"

#include "float_mode.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define HK_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define HK_PAUSE() asm volatile("yield")
#else
#define HK_PAUSE() std::this_thread::yield()
#endif

#include <chrono>
#include <new>

#if defined(_WIN32)
#include <process.h>
#define HK_PROCESS() _getpid()
#else
#include <unistd.h>
#define HK_PROCESS() int(getpid())
#endif

namespace hk {
namespace {
constexpr auto kSpinInJob = std::chrono::microseconds(50);
// Between two forwards lies a round's drafting in Python; a worker that slept through it starts the next one cold.
constexpr auto kSpinBetween = std::chrono::microseconds(3000);
}

Pool::Pool(int num_threads) : size_(num_threads < 1 ? 1 : num_threads), process_(HK_PROCESS()) { start(); }

void Pool::start() {
  try {
    for (int i = 1; i < size_; ++i) threads_.emplace_back([this, i] { work(i); });
  } catch (...) {  // no room for so many: end those that run
    stop();
    throw;
  }
}

Pool::~Pool() {
  if (process_ == HK_PROCESS())
    stop();
  else
    abandon();
}

void Pool::stop() {
  stop_ = true;
  round_.fetch_add(1);
  wake();
  for (auto& t : threads_) t.join();
  threads_.clear();
}

// The parent's threads are not in a child, where they can be neither joined nor detached: their handles are leaked. The
// lock may have been held by one of them, and the condition's end would wait for those that sleep.
void Pool::abandon() {
  new std::vector<std::thread>(std::move(threads_));
  new (&mutex_) std::mutex;
  new (&changed_) std::condition_variable;
}

// After a fork.
void Pool::revive() {
  abandon();
  threads_.clear();
  round_ = 0, phase_ = 0, arrived_ = 0, sleeping_ = 0, stop_ = false;
  start();
  process_ = HK_PROCESS();
}

void Pool::wake() {
  if (sleeping_.load() == 0) return;
  { std::lock_guard<std::mutex> lock(mutex_); }  // a sleeper is either before its check or inside wait
  changed_.notify_all();
}

void Pool::wait_for(const std::atomic<uint32_t>& value, uint32_t old, std::chrono::microseconds spin) {
  const auto until = std::chrono::steady_clock::now() + spin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      HK_PAUSE();
    }
  } while (std::chrono::steady_clock::now() < until);
  sleeping_.fetch_add(1);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return value.load() != old; });
  sleeping_.fetch_sub(1);
}

void Pool::barrier() {
  if (size_ == 1) return;
  const uint32_t old = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(old + 1);
    wake();
  } else {
    wait_for(phase_, old, kSpinInJob);
  }
}

void Pool::run(const std::function<void(int)>& job) {
  if (size_ > 1 && process_ != HK_PROCESS()) revive();
  const FloatMode plain;
  job_ = &job;
  round_.fetch_add(1);
  wake();
  job(0);
  barrier();
}

void Pool::work(int index) {
  const FloatMode plain;
  uint32_t seen = 0;
  for (;;) {
    wait_for(round_, seen, kSpinBetween);
    ++seen;
    if (stop_) return;
    (*job_)(index);
    barrier();
  }
}

}  // namespace hk
