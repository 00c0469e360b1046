// Small pieces of draft networks that are neither matrices nor attention: the recurrent memory and a GRU's gates.

namespace hk::HK_ISA {

// state (k_dim, v_dim) <- decay * state, then + key (weight * (value - state^T key))^T with `delta`, else + key (weight *
// value)^T. v_dim is a multiple of 16, `pull` has room for v_dim.
void memory_write(float* state, const float* key, const float* value, float weight, float decay, bool delta, int k_dim,
                  int v_dim, float* pull) {
  const F keep = set(decay);
  for (int v = 0; v < v_dim; v += 16) {
    F seen = zero();
    for (int i = 0; i < k_dim; ++i) {
      const F s = mul(load(state + i * v_dim + v), keep);
      store(state + i * v_dim + v, s);
      if (delta) seen = fma(set(key[i]), s, seen);
    }
    store(pull + v, mul(set(weight), sub(load(value + v), seen)));
  }
  for (int i = 0; i < k_dim; ++i)
    for (int v = 0; v < v_dim; v += 16)
      store(state + i * v_dim + v, fma(set(key[i]), load(pull + v), load(state + i * v_dim + v)));
}

// out (v_dim) = state^T query * scale
void memory_read(const float* state, const float* query, float scale, int k_dim, int v_dim, float* out) {
  for (int v = 0; v < v_dim; v += 16) {
    F sum = zero();
    for (int i = 0; i < k_dim; ++i) sum = fma(set(query[i]), load(state + i * v_dim + v), sum);
    store(out + v, mul(sum, set(scale)));
  }
}

template <int R, int G>
void some_dots(const float* x, const float* const* rows, int64_t k, float* y, int64_t ldy) {
  F sum[R][G];
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) sum[r][g] = zero();
  for (int64_t j = 0; j < k; j += 16) {
    F w[G];
    for (int g = 0; g < G; ++g) w[g] = load_some(rows[g] + j, k - j);
    for (int r = 0; r < R; ++r) {
      const F in = load_some(x + r * k + j, k - j);
      for (int g = 0; g < G; ++g) sum[r][g] = fma(in, w[g], sum[r][g]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) y[r * ldy + g] = fold_sum(sum[r][g]);
}

template <int R>
void dots_tail(const float* x, int64_t num, const float* rows, const int64_t* ids, int64_t n, int64_t k, float* y,
               int64_t ldy) {
  if (num < R) {
    if constexpr (R > 1) dots_tail<R - 1>(x, num, rows, ids, n, k, y, ldy);
    return;
  }
  constexpr int G = R < 4 ? 4 : 2;  // chains side by side hide the latency of each
  const float* some[G];
  int64_t i = 0;
  for (; i + G <= n; i += G) {
    for (int g = 0; g < G; ++g) some[g] = rows + ids[i + g] * k;
    some_dots<R, G>(x, some, k, y + i, ldy);
  }
  for (; i < n; ++i) some[0] = rows + ids[i] * k, some_dots<R, 1>(x, some, k, y + i, ldy);
  dots_tail<R>(x + R * k, num - R, rows, ids, n, k, y + R * ldy, ldy);
}

// y[r][i] = row r of x (num, k) times row ids[i] of `rows` (.., k), i < n; rows of y lie `ldy` apart.
void dots(const float* x, int64_t num, const float* rows, const int64_t* ids, int64_t n, int64_t k, float* y,
          int64_t ldy) {
  dots_tail<4>(x, num, rows, ids, n, k, y, ldy);
}

inline F sigmoid(F x) { return div(set(1.0f), add(set(1.0f), exp(sub(zero(), x)))); }

// state (n) of a GRU after one step; `in` and `own` (3 n) are its two products: reset, update and new gate.
void gru_step(const float* in, const float* own, int64_t n, float* state) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t left = n - i;
    auto at = [&](const float* p, int gate) { return load_some(p + gate * n + i, left); };
    const F reset = sigmoid(add(at(in, 0), at(own, 0))), update = sigmoid(add(at(in, 1), at(own, 1)));
    const F fresh = tanh(fma(reset, at(own, 2), at(in, 2))), old = load_some(state + i, left);
    put(fma(update, sub(old, fresh), fresh), state + i, left);
  }
}

}  // namespace hk::HK_ISA
