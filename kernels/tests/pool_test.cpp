// The pool: every thread does its part of every job, phases do not overlap, arithmetic is plain on every thread.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "../src/float_mode.h"
#include "../src/half.h"
#include "../src/pool.h"
#include "check.h"

using namespace hk;

namespace {

void jobs_add_up(int threads) {
  Pool pool(threads);
  std::vector<int64_t> numbers(1000), partial(size_t(threads), 0);  // plain memory: the barrier must order it
  int64_t total = 0;
  for (int job = 0; job < 300; ++job) {
    if (job % 50 == 49) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // workers go to sleep
    pool.run([&](int t) {
      const Part p = part(int64_t(numbers.size()), t, pool.size());
      for (int64_t i = p.first; i < p.last; ++i) numbers[size_t(i)] = i + job;
      pool.barrier();
      // Another thread's numbers: wrong when the barrier lets one through early.
      const Part other = part(int64_t(numbers.size()), pool.size() - 1 - t, pool.size());
      partial[size_t(t)] = 0;
      for (int64_t i = other.first; i < other.last; ++i) partial[size_t(t)] += numbers[size_t(i)];
      pool.barrier();
      if (t == 0) {
        total = 0;
        for (int64_t x : partial) total += x;
      }
    });
    check(total == 999 * 1000 / 2 + 1000 * job, "%d threads, job %d: sum %d", threads, job, int(total));
  }
}

void unused_pools_end() {
  for (int i = 0; i < 50; ++i) Pool pool(1 + i % 4);
}

void parts_cover_everything_once() {
  for (int64_t count : {0, 1, 3, 16, 1001})
    for (int of : {1, 2, 3, 7}) {
      int64_t next = 0;
      for (int t = 0; t < of; ++t) {
        check(part(count, t, of).first == next, "parts of %d", int(count));
        next = part(count, t, of).last;
      }
      check(next == count, "parts of %d end at %d", int(count), int(next));
    }
}

#if defined(__x86_64__)
// Whoever loads us may have switched this thread to flushing denormals and rounding down.
void denormals_survive() {
  const unsigned before = _mm_getcsr(), odd = before | 0x8040 | 0x2000;
  _mm_setcsr(odd);
  {
    Pool pool(3);
    std::atomic<int> kept{0};
    pool.run([&](int) {
      volatile float tiny = bits_to_float(1), half = 0.5f, two = 2.0f, third = 3.0f;
      if (float_to_bits(tiny * two) == 2 && float_to_bits(two / third) == 0x3f2aaaab && half > 0) ++kept;
    });
    check(kept == 3, "denormals survive on %d of 3 threads", kept.load());
  }
  check(_mm_getcsr() >> 6 == odd >> 6, "the caller's mode is restored");
  _mm_setcsr(before);
}
#else
void denormals_survive() {}
#endif

}  // namespace

int main() {
  for (int threads : {1, 2, 4}) jobs_add_up(threads);
  unused_pools_end();
  parts_cover_everything_once();
  denormals_survive();
  return report("pool");
}
