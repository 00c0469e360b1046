// Sixteen lanes as four NEON registers, with the dot-product instructions of ARMv8.2.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace hk::HK_ISA {

struct F {
  float32x4_t v[4];
};
struct I {
  int32x4_t v[4];
};
struct B {
  uint8x16_t v[4];
};

constexpr int kMaxRows = 4;  // rows of a linear tile: 16 sums beside the weights in 32 registers
constexpr int kQueries = 4, kScoreVecs = 1, kValueVecs = 1;  // tiles of attention
constexpr int kDotWords = 1;  // words of 4 inputs that one `dot` takes best
constexpr bool kSigned8 = true;  // sdot takes signed bytes; smaller weights fit either way

#define HK_EACH(T, expr)                       \
  T out;                                       \
  for (int i = 0; i < 4; ++i) out.v[i] = (expr); \
  return out

inline F set(float x) { HK_EACH(F, vdupq_n_f32(x)); }
inline F zero() { return set(0.0f); }
inline F load(const float* p) { HK_EACH(F, vld1q_f32(p + 4 * i)); }
inline void store(float* p, F x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
inline F load_half(const uint16_t* p) { HK_EACH(F, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
inline void store_half(uint16_t* p, F x) {
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])));
}
inline F load_bf16(const uint16_t* p) { HK_EACH(F, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
inline F load_i8(const int8_t* p) {
  int8x16_t x = vld1q_s8(p);
  int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
inline F load_u8(const uint8_t* p) {
  uint8x16_t x = vld1q_u8(p);
  uint16x8_t low = vmovl_u8(vget_low_u8(x)), high = vmovl_u8(vget_high_u8(x));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
}

inline F fma(F a, F b, F c) { HK_EACH(F, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
inline F add(F a, F b) { HK_EACH(F, vaddq_f32(a.v[i], b.v[i])); }
inline F sub(F a, F b) { HK_EACH(F, vsubq_f32(a.v[i], b.v[i])); }
inline F mul(F a, F b) { HK_EACH(F, vmulq_f32(a.v[i], b.v[i])); }
inline F div(F a, F b) { HK_EACH(F, vdivq_f32(a.v[i], b.v[i])); }
// As on x86, the second operand where either is NaN.
inline F max(F a, F b) { HK_EACH(F, vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
inline F min(F a, F b) { HK_EACH(F, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
inline F abs(F a) { HK_EACH(F, vabsq_f32(a.v[i])); }
inline F round(F a) { HK_EACH(F, vrndnq_f32(a.v[i])); }
inline F select_lt(F a, F b, F yes, F no) { HK_EACH(F, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), yes.v[i], no.v[i])); }
inline bool all_le(F a, F b) {  // false with a NaN
  uint32x4_t ok = vcleq_f32(a.v[0], b.v[0]);
  for (int i = 1; i < 4; ++i) ok = vandq_u32(ok, vcleq_f32(a.v[i], b.v[i]));
  return vminvq_u32(ok) != 0;
}
inline F scale2(F a, F n) {
  HK_EACH(F, vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v[i]), vshlq_n_s32(vcvtnq_s32_f32(n.v[i]), 23))));
}

inline I set_i(int32_t x) { HK_EACH(I, vdupq_n_s32(x)); }
inline I add_i(I a, I b) { HK_EACH(I, vaddq_s32(a.v[i], b.v[i])); }
inline F to_float(I x) { HK_EACH(F, vcvtq_f32_s32(x.v[i])); }
inline I to_int(F x) { HK_EACH(I, vcvtnq_s32_f32(x.v[i])); }  // to nearest, even among equals
inline void store_i8(int8_t* p, I x) {
  int16x8_t low = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1]));
  int16x8_t high = vcombine_s16(vmovn_s32(x.v[2]), vmovn_s32(x.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

// Lane i with lane i + 8, then with i + 4, i + 2, i + 1: rows.inl has the same in plain words.
#define HK_FOLDS
inline float fold_sum(F x) {
  const float32x4_t a = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
  return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}
inline float32x4_t max4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float fold_max(F x) {
  const float32x4_t a = max4(max4(x.v[0], x.v[2]), max4(x.v[1], x.v[3]));
  const float32x4_t b = max4(a, vextq_f32(a, a, 2));
  return vgetq_lane_f32(max4(b, vextq_f32(b, b, 1)), 0);
}
inline int32_t fold_int(I x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3]))); }

inline B load_b(const uint8_t* p) { HK_EACH(B, vld1q_u8(p + 16 * i)); }
inline B low4(B x) { HK_EACH(B, vandq_u8(x.v[i], vdupq_n_u8(15))); }
inline B high4(B x) { HK_EACH(B, vshrq_n_u8(x.v[i], 4)); }
inline B flip8(B x) { HK_EACH(B, veorq_u8(x.v[i], vdupq_n_u8(0x80))); }
inline B or_b(B a, B b) { HK_EACH(B, vorrq_u8(a.v[i], b.v[i])); }
template <int SHIFT, int BITS, int TO>
inline B field(B x) {
  HK_EACH(B, vandq_u8(vshlq_u8(x.v[i], vdupq_n_s8(TO - SHIFT)), vdupq_n_u8(uint8_t(((1 << BITS) - 1) << TO))));
}

template <int BITS, int N>
inline I dot(const B* w, const int32_t* x, I sum) {
  for (int j = 0; j < N; ++j) {
    const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(x[j]));
    for (int i = 0; i < 4; ++i) sum.v[i] = vdotq_s32(sum.v[i], vreinterpretq_s8_u8(w[j].v[i]), v);
  }
  return sum;
}

#undef HK_EACH

}  // namespace hk::HK_ISA
