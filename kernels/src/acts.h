// Owned memory of quantised activations (kernels.h, Acts), grown when more rows come.
#pragma once
#include <cstdlib>
#include <memory>
#include <new>

#include "kernels.h"

namespace hk {

struct AlignedFree {
  void operator()(void* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
template <class T>
using Buffer = std::unique_ptr<T[], AlignedFree>;

template <class T>
Buffer<T> make_buffer(int64_t count) {
  return Buffer<T>(static_cast<T*>(::operator new[](size_t(count < 1 ? 1 : count) * sizeof(T), std::align_val_t(64))));
}

class ActsBuffer {
 public:
  ActsBuffer(int64_t rows, int64_t k, bool with_float) {
    const int64_t padded = round_up(k, kBlock), cells = padded / kBlock * rows;
    q_ = make_buffer<int8_t>(cells * kBlock);
    floats_ = make_buffer<float>(2 * cells);
    ints_ = make_buffer<int32_t>(5 * cells);
    if (with_float) x_ = make_buffer<float>(rows * padded);
    bytes = cells * (kBlock + 7 * 4) + (with_float ? 4 * rows * padded : 0);
    acts = {rows,          padded,           q_.get(),         floats_.get(),       floats_.get() + cells,
            ints_.get(),   ints_.get() + cells, ints_.get() + 2 * cells, ints_.get() + 3 * cells, x_.get()};
  }
  Acts acts;
  int64_t bytes;

 private:
  Buffer<int8_t> q_;
  Buffer<float> floats_, x_;
  Buffer<int32_t> ints_;
};

}  // namespace hk
