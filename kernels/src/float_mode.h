// Plain IEEE arithmetic on this thread while a FloatMode lives: rounding to nearest, denormals kept. Other libraries
// switch threads to flushing denormals, and a row's bits must not depend on them.
#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hk {

class FloatMode {
 public:
  FloatMode() : before_(get()) { set(kPlain); }
  ~FloatMode() { set(before_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kPlain = 0x1f80;  // exceptions masked, nothing else
  static uint64_t get() { return _mm_getcsr(); }
  static void set(uint64_t mode) { _mm_setcsr(uint32_t(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kPlain = 0;
  static uint64_t get() {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  static constexpr uint64_t kPlain = 0;
  static uint64_t get() { return 0; }
  static void set(uint64_t) {}
#endif
  const uint64_t before_;
};

}  // namespace hk
