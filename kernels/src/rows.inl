// What happens to single rows between matrices: quantisation, norms, activations. Sums run over 16 lanes in ascending
// order and are folded in one fixed tree, so every instruction set gives the same bits.

namespace hk::HK_ISA {

inline void put(F sum, float* y, int64_t left) {  // left: values there is room for
  if (left >= kLanes) return store(y, sum);
  float t[kLanes];
  store(t, sum);
  for (int64_t i = 0; i < left; ++i) y[i] = t[i];
}

#ifndef HK_FOLDS
inline float fold_sum(F x) {
  float t[16];
  store(t, x);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) t[i] += t[i + n];
  return t[0];
}

inline float fold_max(F x) {
  float t[16];
  store(t, x);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
  return t[0];
}

inline int32_t fold_int(I x) {
  int32_t sum = 0;
  for (int32_t v : x.v) sum += v;
  return sum;
}
#endif

inline F load_some(const float* p, int64_t n) {  // lanes from n on are zero
  if (n >= 16) return load(p);
  float t[16] = {};
  for (int64_t i = 0; i < n; ++i) t[i] = p[i];
  return load(t);
}

// Values whose block maximum lies below this are zero: 127 / maximum must be finite.
constexpr float kSmallestMax = 1e-30f, kLargest = 3.402823466e38f;

void quantize(const float* x, int64_t k, const Acts& a, int64_t row, int64_t b0, int64_t b1) {
  for (int64_t b = b0; b < b1; ++b) {
    const int64_t left = k - b * kBlock, at = b * a.stride + row;
    F low = load_some(x + b * kBlock, left), high = left > 16 ? load_some(x + b * kBlock + 16, left - 16) : zero();
    float most = fold_max(max(abs(low), abs(high)));
    bool finite = all_le(abs(low), set(kLargest)) && all_le(abs(high), set(kLargest)), some = finite && most >= kSmallestMax;
    float inverse = some ? 127.0f / most : 0.0f, d = some ? most / 127.0f : 0.0f;
    int8_t* q = a.q + at * kBlock;
    const I q0 = to_int(some ? mul(low, set(inverse)) : zero()), q1 = to_int(some ? mul(high, set(inverse)) : zero());
    store_i8(q, q0), store_i8(q + 16, q1);
    const int32_t first = fold_int(q0), second = fold_int(q1), sum = first + second;
    a.d[at] = finite ? d : bits_to_float(0x7fc00000);
    a.ds[at] = a.d[at] * float(sum);
    a.s8[at] = -8 * sum, a.s16[at] = -16 * sum, a.s128[at] = -128 * sum;
    a.s32[2 * at] = -32 * first, a.s32[2 * at + 1] = -32 * second;
  }
  if (a.x)
    for (int64_t i = b0 * kBlock; i < b1 * kBlock; ++i) a.x[row * a.k + i] = i < k ? x[i] : 0.0f;
}

// exp(x): 0 below -86.5, capped at exp(80); within 2 ulp between. NaN stays NaN.
inline F exp(F x) {
  F y = min(set(80.0f), max(set(-86.5f), x));
  F n = round(mul(y, set(1.44269504f)));
  F r = fma(n, set(-1.42860677e-6f), fma(n, set(-0.693145752f), y));
  F p = fma(r, set(1.0f / 720), set(1.0f / 120));
  p = fma(p, r, set(1.0f / 24)), p = fma(p, r, set(1.0f / 6)), p = fma(p, r, set(0.5f));
  p = fma(p, r, set(1.0f)), p = fma(p, r, set(1.0f));
  return select_lt(x, set(-86.5f), zero(), scale2(p, n));
}

// The rational approximation of Eigen: within 4 ulp, so that small values keep their digits.
inline F tanh(F x) {
  F y = min(set(7.90531110763549805f), max(set(-7.90531110763549805f), x)), z = mul(y, y);
  F p = fma(z, set(-2.76076847742355e-16f), set(2.00018790482477e-13f));
  p = fma(p, z, set(-8.60467152213735e-11f)), p = fma(p, z, set(5.12229709037114e-08f));
  p = fma(p, z, set(1.48572235717979e-05f)), p = fma(p, z, set(6.37261928875436e-04f));
  p = mul(fma(p, z, set(4.89352455891786e-03f)), y);
  F q = fma(z, set(1.19825839466702e-06f), set(1.18534705686654e-04f));
  q = fma(q, z, set(2.26843463243900e-03f)), q = fma(q, z, set(4.89352518554385e-03f));
  return div(p, q);
}

// Both are zero where exp's cap would show.
inline F silu(F x) { return select_lt(x, set(-80.0f), zero(), div(x, add(set(1.0f), exp(sub(zero(), x))))); }
inline F gelu_tanh(F x) {
  F inner = mul(set(-1.5957691216f), fma(mul(mul(x, x), x), set(0.044715f), x));
  return select_lt(x, set(-9.5f), zero(), div(x, add(set(1.0f), exp(inner))));
}

// y = act(gate) * up
void gated(int act, const float* gate, const float* up, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += 16) {
    F g = load_some(gate + i, n - i), u = load_some(up + i, n - i);
    put(mul(act == kGelu ? gelu_tanh(g) : silu(g), u), y + i, n - i);
  }
}

// y = x / rms(x) * weight
void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* y) {
  F sum = zero();
  for (int64_t i = 0; i < n; i += 16) {
    F v = load_some(x + i, n - i);
    sum = fma(v, v, sum);
  }
  F scale = set(1.0f / std::sqrt(fold_sum(sum) / float(n) + eps));
  for (int64_t i = 0; i < n; i += 16)
    put(mul(mul(load_some(x + i, n - i), scale), load_some(weight + i, n - i)), y + i, n - i);
}

inline bool better(float a, float b) { return a > b || (a != a && b == b); }

void top(const float* x, int64_t n, int32_t first, int32_t num, int32_t* ids, float* values) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t count = n - i < 16 ? n - i : 16;
    if (count == 16 && ids[num - 1] >= 0 && all_le(load(x + i), set(values[num - 1]))) continue;
    for (int64_t j = i; j < i + count; ++j) {
      if (ids[num - 1] >= 0 && !better(x[j], values[num - 1])) continue;
      int32_t at = num - 1;
      for (; at > 0 && (ids[at - 1] < 0 || better(x[j], values[at - 1])); --at)
        ids[at] = ids[at - 1], values[at] = values[at - 1];
      ids[at] = first + int32_t(j), values[at] = x[j];
    }
  }
}

float sum_exp(const float* x, int64_t n, float maximum) {
  F sum = zero();
  for (int64_t i = 0; i < n; i += 16) {
    float t[kLanes];
    store(t, exp(sub(load_some(x + i, n - i), set(maximum))));
    for (int64_t j = n - i; j < kLanes; ++j) t[j] = 0.0f;
    sum = add(sum, load(t));
  }
  return fold_sum(sum);
}

// Turn pairs of x by angles whose cosines (half) and sines (half) are given: (i, i + half), or (2i, 2i + 1).
void rotate(float* x, const float* turn, int64_t half, bool interleaved) {
  const float *cos = turn, *sin = turn + half;
  int64_t i = 0;
  for (; !interleaved && i + 16 <= half; i += 16) {
    const F a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, sub(mul(a, c), mul(b, s))), store(x + half + i, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; ++i) {
    float &a = x[interleaved ? 2 * i : i], &b = x[interleaved ? 2 * i + 1 : half + i];
    const float a0 = a, b0 = b;
    a = a0 * cos[i] - b0 * sin[i], b = b0 * cos[i] + a0 * sin[i];
  }
}

// x = cap * tanh(x / cap), after a scale
void scale_and_cap(float* x, int64_t n, float scale, float cap) {
  for (int64_t i = 0; i < n; i += 16) {
    F v = mul(load_some(x + i, n - i), set(scale));
    if (cap > 0) v = mul(tanh(mul(v, set(1.0f / cap))), set(cap));
    put(v, x + i, n - i);
  }
}

}  // namespace hk::HK_ISA
