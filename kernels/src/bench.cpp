// What this machine can do at best: the rates from which a floor under a forward's time is made.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>

#include "dispatch.h"
#include "hyflash_kernels.h"
#include "pool.h"

using namespace hk;

extern "C" double hk_bench(const char* isa, int32_t num_threads, int32_t what, const void* data, int64_t bytes) {
  const Kernels* table = isa && *isa ? kernels_named(isa) : kernels();
  if (!table || bytes < 4096) return 0;
  try {
    Pool pool(num_threads);
    double rate = 0, spent = 0;
    for (int64_t passes = 1; spent < 2e-2;) {  // other work on the machine only ever lowers a rate, so the best counts
      std::atomic<int64_t> done{0};
      const auto begin = std::chrono::steady_clock::now();
      pool.run([&](int t) {
        alignas(64) float sink[kLanes];
        // Reading is shared out; arithmetic is done by each thread on all of the data.
        const Part share = what == 2 ? part(bytes / 256, t, pool.size()) : Part{0, bytes / 256};
        done += table->exercise(what, static_cast<const uint8_t*>(data) + 256 * share.first,
                                256 * (share.last - share.first), passes, sink);
      });
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      rate = std::max(rate, double(done) / seconds), spent += seconds;
      if (seconds < 1e-3) passes *= 2;
    }
    return rate;
  } catch (const std::exception&) {  // no memory, no threads
    return 0;
  }
}
