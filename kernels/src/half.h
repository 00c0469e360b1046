// Scalar conversions between float, IEEE half and bfloat16. Round to nearest even, NaN stays NaN.
// `static inline` here and in the other headers that files of several instruction sets include: of plain inline
// functions the linker would keep one copy, perhaps one that this CPU cannot run.
#pragma once
#include <cstdint>
#include <cstring>

namespace hk {

static inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

static inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

static inline float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ff) << 13);  // infinity, NaN
  if (rest >= 0x400) return bits_to_float(sign | ((rest << 13) + (112u << 23)));
  float tiny = float(rest) * 0x1p-24f;  // subnormal: exact
  return sign ? -tiny : tiny;
}

static inline uint16_t float_to_half(float f) {
  uint32_t u = float_to_bits(f), sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (u >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and above round to infinity
  if (u < 0x38800000) {                                  // result is subnormal: let float addition round
    uint32_t r = float_to_bits(bits_to_float(u) + 0.5f) - 0x3f000000u;
    return uint16_t(sign | r);
  }
  uint32_t odd = u >> 13 & 1;
  return uint16_t(sign | (u - (112u << 23) + 0xfff + odd) >> 13);
}

static inline float bf16_to_float(uint16_t b) { return bits_to_float(uint32_t(b) << 16); }

static inline uint16_t float_to_bf16(float f) {
  uint32_t u = float_to_bits(f);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16 | 0x40);
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

}  // namespace hk
