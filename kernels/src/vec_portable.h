// Sixteen lanes in plain C++, for CPUs without a path of their own and as the oracle of the others.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace hk::HK_ISA {

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};
struct B {
  uint8_t v[64];
};

constexpr int kMaxRows = 4;
constexpr int kQueries = 2, kScoreVecs = 1, kValueVecs = 1;  // tiles of attention
constexpr int kDotWords = 8;  // words of 4 inputs that one `dot` takes best
constexpr bool kSigned8 = false;

#define HK_EACH(expr)                     \
  F out;                                  \
  for (int i = 0; i < 16; ++i) out.v[i] = (expr); \
  return out

// a * b + c rounded once. Without the instruction: products of floats are exact in double, and a sum rounded to odd
// there rounds correctly to float.
inline float fma1(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
  return std::fma(a, b, c);
#else
  const double p = double(a) * double(b), s = p + double(c), t = s - p;
  const double error = (p - (s - t)) + (double(c) - t);
  uint64_t bits;
  std::memcpy(&bits, &s, 8);
  if (error != 0 && error - error == 0 && !(bits & 1)) bits += (error > 0) == (s > 0) ? 1 : -1;
  double odd;
  std::memcpy(&odd, &bits, 8);
  return float(odd);
#endif
}

inline F set(float x) { HK_EACH(x); }
inline F zero() { return set(0.0f); }
inline F load(const float* p) { HK_EACH(p[i]); }
inline void store(float* p, F x) { std::memcpy(p, x.v, sizeof x.v); }
inline F load_half(const uint16_t* p) { HK_EACH(half_to_float(p[i])); }
inline void store_half(uint16_t* p, F x) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(x.v[i]);
}
inline F load_bf16(const uint16_t* p) { HK_EACH(bf16_to_float(p[i])); }
inline F load_i8(const int8_t* p) { HK_EACH(float(p[i])); }
inline F load_u8(const uint8_t* p) { HK_EACH(float(p[i])); }

inline F fma(F a, F b, F c) { HK_EACH(fma1(a.v[i], b.v[i], c.v[i])); }
inline F add(F a, F b) { HK_EACH(a.v[i] + b.v[i]); }
inline F sub(F a, F b) { HK_EACH(a.v[i] - b.v[i]); }
inline F mul(F a, F b) { HK_EACH(a.v[i] * b.v[i]); }
inline F div(F a, F b) { HK_EACH(a.v[i] / b.v[i]); }
inline F max(F a, F b) { HK_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F min(F a, F b) { HK_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F abs(F a) { HK_EACH(std::fabs(a.v[i])); }
inline F round(F a) { HK_EACH(std::nearbyint(a.v[i])); }
inline F select_lt(F a, F b, F yes, F no) { HK_EACH(a.v[i] < b.v[i] ? yes.v[i] : no.v[i]); }
inline bool all_le(F a, F b) {  // false with a NaN
  for (int i = 0; i < 16; ++i)
    if (!(a.v[i] <= b.v[i])) return false;
  return true;
}
inline F scale2(F a, F n) {  // n is whole; NaN where a is
  HK_EACH(n.v[i] == n.v[i] ? bits_to_float(float_to_bits(a.v[i]) + (uint32_t(int32_t(n.v[i])) << 23)) : a.v[i]);
}

inline I set_i(int32_t x) {
  I out;
  for (int32_t& v : out.v) v = x;
  return out;
}
inline I add_i(I a, I b) {
  for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
  return a;
}
inline F to_float(I x) { HK_EACH(float(x.v[i])); }
inline I to_int(F x) {  // to nearest, even among equals
  I out;
  for (int i = 0; i < 16; ++i) out.v[i] = int32_t(std::nearbyint(x.v[i]));
  return out;
}
inline void store_i8(int8_t* p, I x) {
  for (int i = 0; i < 16; ++i) p[i] = int8_t(x.v[i]);
}

#define HK_BYTES(expr)                    \
  B out;                                  \
  for (int i = 0; i < 64; ++i) out.v[i] = uint8_t(expr); \
  return out
inline B load_b(const uint8_t* p) { HK_BYTES(p[i]); }
inline B low4(B x) { HK_BYTES(x.v[i] & 15); }
inline B high4(B x) { HK_BYTES(x.v[i] >> 4); }
inline B flip8(B x) { HK_BYTES(x.v[i] ^ 0x80); }
inline B or_b(B a, B b) { HK_BYTES(a.v[i] | b.v[i]); }
template <int SHIFT, int BITS, int TO>
inline B field(B x) { HK_BYTES((x.v[i] >> SHIFT & ((1 << BITS) - 1)) << TO); }

template <int BITS, int N>
inline I dot(const B* w, const int32_t* x, I sum) {
  const int8_t* in = (const int8_t*)x;
  for (int j = 0; j < N; ++j)
    for (int lane = 0; lane < 16; ++lane)
      for (int i = 0; i < 4; ++i) sum.v[lane] += int32_t(w[j].v[4 * lane + i]) * in[4 * j + i];
  return sum;
}

#undef HK_EACH
#undef HK_BYTES

}  // namespace hk::HK_ISA
