// What the C++ tests share: random numbers, a count of failures, the tables of every instruction set that runs here.
#pragma once
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <random>
#include <vector>

#include "../src/dispatch.h"

namespace hk {

inline int failures = 0;

inline void check(bool ok, const char* format, ...) {
  if (ok || ++failures > 20) return;
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::printf("\n");
}

inline std::vector<float> normal(size_t n, float scale = 1.0f) {
  static std::mt19937 rng(1);
  std::normal_distribution<float> d(0.0f, scale);
  std::vector<float> out(n);
  for (float& x : out) x = d(rng);
  return out;
}

inline std::vector<const Kernels*> tables() {
  std::vector<const Kernels*> out;
  for (const char* name : {"portable", "neon", "avx2", "avxvnni", "avx512", "amx"})
    if (const Kernels* k = kernels_named(name)) out.push_back(k);
  return out;
}

inline int report(const char* what) {
  std::printf("%s: %d instruction sets, %d failures\n", what, int(tables().size()), failures);
  return failures != 0;
}

}  // namespace hk
