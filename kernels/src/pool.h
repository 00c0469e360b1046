// A persistent pool of threads that work in phases. Waiting spins first, for some microseconds inside a job, because its
// phases are that short, and for milliseconds between jobs, as long as a round of decoding may need; then it sleeps, so
// that an idle or preempted process does not burn a core. A forked child has none of
// its parent's threads and starts its own at its first job.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace hk {

class Pool {
 public:
  explicit Pool(int num_threads);  // throws std::system_error when there are no more threads to be had
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }

  // Run job(t) for t = 0..size-1, each on its own thread, 0 on the caller's; returns when all are done. Throws
  // std::system_error in a forked child that cannot have threads.
  void run(const std::function<void(int)>& job);

  // To be called by every thread of a job: nobody goes on before all have come.
  void barrier();

 private:
  void start();
  void revive();
  void abandon();
  void work(int index);
  void wait_for(const std::atomic<uint32_t>& value, uint32_t old, std::chrono::microseconds spin);
  void wake();
  void stop();

  const int size_;
  int process_;  // whose threads these are
  std::vector<std::thread> threads_;
  const std::function<void(int)>* job_ = nullptr;
  alignas(64) std::atomic<uint32_t> round_{0};      // counts jobs; a change starts the workers
  alignas(64) std::atomic<uint32_t> phase_{0};      // counts barriers
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
};

// The part [first, last) of `count` items that thread t of `of` takes.
struct Part {
  int64_t first, last;
};
inline Part part(int64_t count, int t, int of) { return {count * t / of, count * (t + 1) / of}; }

}  // namespace hk
