// Sixteen lanes as two AVX2 registers; with HK_AVXVNNI byte products use its instruction.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace hk::HK_ISA {

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
using B = I;

constexpr int kMaxRows = 4;  // rows of a linear tile: 8 sums beside the weights in 16 registers
constexpr int kQueries = 3, kScoreVecs = 1, kValueVecs = 1;  // tiles of attention
#ifdef HK_AVXVNNI
constexpr int kDotWords = 1;  // words of 4 inputs that one `dot` takes best
constexpr bool kSigned8 = false;
#else
constexpr int kDotWords = 8;
constexpr bool kSigned8 = true;  // |w| and sign(x, w) keep pair sums inside int16
#endif

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline __m128i half_of(const void* p, int i) { return _mm_loadu_si128((const __m128i*)p + i); }
inline F load_half(const uint16_t* p) { return {_mm256_cvtph_ps(half_of(p, 0)), _mm256_cvtph_ps(half_of(p, 1))}; }
inline void store_half(uint16_t* p, F x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, mode)), _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(x.b, mode));
}
inline __m256 widen_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline F load_bf16(const uint16_t* p) { return {widen_bf16(half_of(p, 0)), widen_bf16(half_of(p, 1))}; }
inline F load_i8(const int8_t* p) {
  __m128i x = half_of(p, 0);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
inline F load_u8(const uint8_t* p) {
  __m128i x = half_of(p, 0);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}

inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline __m256 abs8(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline F abs(F x) { return {abs8(x.a), abs8(x.b)}; }
inline __m256 round8(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F round(F x) { return {round8(x.a), round8(x.b)}; }
inline __m256 lt8(__m256 a, __m256 b, __m256 yes, __m256 no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline F select_lt(F a, F b, F yes, F no) { return {lt8(a.a, b.a, yes.a, no.a), lt8(a.b, b.b, yes.b, no.b)}; }
inline bool all_le(F x, F y) {  // false with a NaN
  __m256 ok = _mm256_and_ps(_mm256_cmp_ps(x.a, y.a, _CMP_LE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LE_OQ));
  return _mm256_movemask_ps(ok) == 0xff;
}
inline __m256 scale8(__m256 a, __m256 n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
inline F scale2(F a, F n) { return {scale8(a.a, n.a), scale8(a.b, n.b)}; }

inline I add_i(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I set_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }  // to nearest, even among equals
inline void store_i8(int8_t* p, I x) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

// Lane i with lane i + 8, then with i + 4, i + 2, i + 1: rows.inl has the same in plain words.
#define HK_FOLDS
inline float fold_sum(F x) {
  const __m256 a = _mm256_add_ps(x.a, x.b);
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
inline float fold_max(F x) {
  const __m256 a = _mm256_max_ps(x.a, x.b);
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
inline int32_t fold_int(I x) {
  const __m256i a = _mm256_add_epi32(x.a, x.b);
  const __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i c = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
}

inline B load_b(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)}; }
inline B and_b(B x, char m) { return {_mm256_and_si256(x.a, _mm256_set1_epi8(m)), _mm256_and_si256(x.b, _mm256_set1_epi8(m))}; }
inline B low4(B x) { return and_b(x, 15); }
inline B high4(B x) { return and_b({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}, 15); }
template <int SHIFT, int BITS, int TO>
inline B field(B x) {
  constexpr int left = TO > SHIFT ? TO - SHIFT : 0, right = SHIFT > TO ? SHIFT - TO : 0;
  B y = {_mm256_srli_epi16(_mm256_slli_epi16(x.a, left), right), _mm256_srli_epi16(_mm256_slli_epi16(x.b, left), right)};
  return and_b(y, char(((1 << BITS) - 1) << TO));
}
inline B flip8(B x) {
  __m256i top = _mm256_set1_epi8(char(0x80));
  return {_mm256_xor_si256(x.a, top), _mm256_xor_si256(x.b, top)};
}
inline B or_b(B x, B y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }

#ifdef HK_AVXVNNI
template <int BITS, int N>
inline I dot(const B* w, const int32_t* x, I sum) {
  for (int j = 0; j < N; ++j) {
    __m256i v = _mm256_set1_epi32(x[j]);
    sum = {_mm256_dpbusd_avx_epi32(sum.a, w[j].a, v), _mm256_dpbusd_avx_epi32(sum.b, w[j].b, v)};
  }
  return sum;
}
#else
inline __m256i pairs(__m256i words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }

// Pair sums are int16: |w| * 127 * 2 each. `kRun` of them may be added before they could overflow.
template <int BITS, int N>
inline I dot(const B* w, const int32_t* x, I sum) {
  constexpr int kRun = BITS <= 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;
  for (int j = 0; j < N; j += kRun) {
    __m256i a = _mm256_setzero_si256(), b = a;
    for (int i = j; i < j + kRun && i < N; ++i) {
      __m256i v = _mm256_set1_epi32(x[i]);
      if constexpr (BITS == 8) {
        a = _mm256_maddubs_epi16(_mm256_sign_epi8(w[i].a, w[i].a), _mm256_sign_epi8(v, w[i].a));
        b = _mm256_maddubs_epi16(_mm256_sign_epi8(w[i].b, w[i].b), _mm256_sign_epi8(v, w[i].b));
      } else {
        a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w[i].a, v));
        b = _mm256_add_epi16(b, _mm256_maddubs_epi16(w[i].b, v));
      }
    }
    sum = {_mm256_add_epi32(sum.a, pairs(a)), _mm256_add_epi32(sum.b, pairs(b))};
  }
  return sum;
}
#endif

}  // namespace hk::HK_ISA
