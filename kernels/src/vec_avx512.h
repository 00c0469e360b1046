// Sixteen lanes on AVX-512 with VNNI. See vec.md for the meaning of each operation.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace hk::HK_ISA {

using F = __m512;   // 16 float32
using I = __m512i;  // 16 int32
using B = __m512i;  // 64 bytes: lane l holds 4 consecutive inputs of output l

#ifdef HK_SMALL_TILES
constexpr int kMaxRows = 4, kQueries = 2;
#else
constexpr int kMaxRows = 16;  // rows of a linear tile: 16 sums and 8 weights fit in 32 registers
constexpr int kQueries = 6;   // rows of a tile of attention
#endif
constexpr int kScoreVecs = 4, kValueVecs = 4;
constexpr int kDotWords = 1;  // words of 4 inputs that one `dot` takes best
constexpr bool kSigned8 = false;  // dot<8> takes weights as unsigned bytes, 128 too large

inline F zero() { return _mm512_setzero_ps(); }
inline F set(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void store_half(uint16_t* p, F x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline F load_i8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline F load_u8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }

inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F select_lt(F a, F b, F yes, F no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes); }
inline bool all_le(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ) == 0xffff; }  // false with a NaN
inline F scale2(F a, F n) { return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23))); }

inline I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
inline I set_i(int32_t x) { return _mm512_set1_epi32(x); }
inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
inline I to_int(F x) { return _mm512_cvtps_epi32(x); }  // to nearest, even among equals
inline void store_i8(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }

// Lane i with lane i + 8, then with i + 4, i + 2, i + 1: rows.inl has the same in plain words.
#define HK_FOLDS
inline float fold_sum(F x) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
inline float fold_max(F x) {
  const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
inline int32_t fold_int(I x) { return _mm512_reduce_add_epi32(x); }

inline B load_b(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline B low4(B x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline B high4(B x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
template <int SHIFT, int BITS, int TO>
inline B field(B x) {  // bits SHIFT.. of each byte, BITS of them, moved to bit TO
  constexpr int move = TO - SHIFT;
  B y = move >= 0 ? _mm512_slli_epi16(x, move >= 0 ? move : 0) : _mm512_srli_epi16(x, move < 0 ? -move : 0);
  return _mm512_and_si512(y, _mm512_set1_epi8(char(((1 << BITS) - 1) << TO)));
}
inline B flip8(B x) { return _mm512_xor_si512(x, _mm512_set1_epi8(char(0x80))); }
inline B or_b(B a, B b) { return _mm512_or_si512(a, b); }

// sum + over N groups of four inputs; BITS bounds the weights (the AVX2 path needs to know).
template <int BITS, int N>
inline I dot(const B* w, const int32_t* x, I sum) {
  for (int j = 0; j < N; ++j) sum = _mm512_dpbusd_epi32(sum, w[j], _mm512_set1_epi32(x[j]));
  return sum;
}

}  // namespace hk::HK_ISA
