// Attention of verified rows over the cached keys and values of their sequence.
// The context is cut into splits of 256 tokens from position 0. A split gives each query its maximum, its sum and its
// weighted values; splits are merged in ascending order. So a row's bits depend on its position and context alone,
// not on threads, other rows, or how the work was shared out.

namespace hk::HK_ISA {

template <int KV>
inline F load_kv(const uint8_t* p, int64_t i) {
  if constexpr (KV == kKvF16) return load_half((const uint16_t*)p + i);
  if constexpr (KV == kKvBF16) return load_bf16((const uint16_t*)p + i);
  if constexpr (KV == kKvF32) return load((const float*)p + i);
  if constexpr (KV == kKvI8) return load_i8((const int8_t*)p + i);
}

// While one page is read, the next one is fetched at the same pace: pages lie apart, and a prefetcher that follows
// addresses starts anew with each.
template <int KV>
constexpr int kv_bytes = KV == kKvF32 ? 4 : KV == kKvI8 ? 1 : 2;

inline void fetch(const uint8_t* next, int64_t at, int bytes) {
  for (int i = 0; next && i < bytes; i += 64) __builtin_prefetch(next + at + i);
}

// scores[i][t] of Q queries and 16 V tokens of a page; keys lie as [dim][64 tokens].
template <int KV, int Q, int V>
void some_scores(const float* const* q, const uint8_t* keys, int dim, float* const* scores, int at, int t,
                 const uint8_t* next) {
  F sum[Q][V];
  for (int i = 0; i < Q; ++i)
    for (int v = 0; v < V; ++v) sum[i][v] = zero();
  for (int d = 0; d < dim; ++d) {
    fetch(next, int64_t(d) * kPage * kv_bytes<KV>, kPage * kv_bytes<KV>);
    F k[V];
    for (int v = 0; v < V; ++v) k[v] = load_kv<KV>(keys, d * kPage + t + 16 * v);
    for (int i = 0; i < Q; ++i)
      for (int v = 0; v < V; ++v) sum[i][v] = fma(set(q[i][d]), k[v], sum[i][v]);
  }
  const float* scale = (const float*)(keys + dim * kPage) + t;
  for (int i = 0; i < Q; ++i)
    for (int v = 0; v < V; ++v)
      store(scores[i] + at + t + 16 * v, KV == kKvI8 ? mul(sum[i][v], load(scale + 16 * v)) : sum[i][v]);
}

template <int KV, int Q, int V>
void page_scores(const float* const* q, const uint8_t* keys, int dim, float* const* scores, int at, int t, int count,
                 const uint8_t* next) {
  for (; t + 16 * V <= count; t += 16 * V, next = nullptr) some_scores<KV, Q, V>(q, keys, dim, scores, at, t, next);
  if constexpr (V > 1) page_scores<KV, Q, V / 2>(q, keys, dim, scores, at, t, count, next);
}

// out[i][at..] += p[i][t] * values[t][at..] for the page's tokens first..last; values lie as [token][dim].
template <int KV, int Q, int V>
void some_values(const float* const* p, const uint8_t* values, int dim, int at, int first, int last, float* const* out,
                 const uint8_t* next) {
  F sum[Q][V];
  for (int i = 0; i < Q; ++i)
    for (int v = 0; v < V; ++v) sum[i][v] = load(out[i] + at + 16 * v);
  const float* scale = (const float*)(values + dim * kPage);
  for (int t = first; t < last; ++t) {
    fetch(next, int64_t(t) * dim * kv_bytes<KV>, dim * kv_bytes<KV>);
    F x[V];
    for (int v = 0; v < V; ++v) x[v] = load_kv<KV>(values, t * dim + at + 16 * v);
    for (int i = 0; i < Q; ++i) {
      const F w = set(KV == kKvI8 ? p[i][t] * scale[t] : p[i][t]);
      for (int v = 0; v < V; ++v) sum[i][v] = fma(w, x[v], sum[i][v]);
    }
  }
  for (int i = 0; i < Q; ++i)
    for (int v = 0; v < V; ++v) store(out[i] + at + 16 * v, sum[i][v]);
}

template <int KV, int Q>
void page_values(const float* const* p, const uint8_t* values, int dim, int first, int last, float* const* out,
                 const uint8_t* next = nullptr) {
  int at = 0;
  for (; at + 16 * kValueVecs <= dim; at += 16 * kValueVecs, next = nullptr)
    some_values<KV, Q, kValueVecs>(p, values, dim, at, first, last, out, next);
  for (; at < dim; at += 16, next = nullptr) some_values<KV, Q, 1>(p, values, dim, at, first, last, out, next);
}

// Scores of one query -> weights exp(score - maximum), zero outside tokens first..last.
inline void soften(float* s, int num, int first, int last, float cap, float* maximum, float* total) {
  if (cap > 0) scale_and_cap(s, num, 1.0f, cap);
  for (int t = 0; t < first; ++t) s[t] = -INFINITY;
  for (int t = last; t < num; ++t) s[t] = -INFINITY;
  F most = set(-INFINITY), sum = zero();
  for (int t = 0; t < num; t += 16) most = max(most, load(s + t));
  const float m = fold_max(most);
  for (int t = 0; t < num; t += 16) {
    F e = exp(sub(load(s + t), set(m)));
    store(s + t, e);
    sum = add(sum, e);
  }
  *maximum = m, *total = fold_sum(sum);
}

template <int KV, int Q>
void split_tile(const Split& c, int q0) {
  float* scores[Q];
  int first[Q], last[Q], low = kSplit, both = 0, high = kSplit, most = 0;
  for (int i = 0; i < Q; ++i) {
    const int64_t pos = c.pos[q0 + i] - c.begin;  // of the query, inside the split
    const int64_t from = c.window > 0 ? pos - c.window + 1 : 0;
    first[i] = int(from < 0 ? 0 : from > kSplit ? kSplit : from);
    last[i] = int(pos + 1 < 0 ? 0 : pos + 1 > kSplit ? kSplit : pos + 1);
    if (last[i] < first[i]) last[i] = first[i];
    low = first[i] < low ? first[i] : low, both = first[i] > both ? first[i] : both;
    high = last[i] < high ? last[i] : high;
    most = last[i] > most ? last[i] : most;
    scores[i] = c.scratch + i * kSplit;
  }
  const int pages = (most + kPage - 1) / kPage, num = (most + 15) / 16 * 16;  // tokens looked at
  for (int g = low / kPage; g < pages; ++g) {
    const int count = num - g * kPage < kPage ? num - g * kPage : kPage;
    const uint8_t* next = q0 > 0 ? nullptr : g + 1 < pages ? c.keys[g + 1] : c.values[low / kPage];
    page_scores<KV, Q, kScoreVecs>(c.q + q0, c.keys[g], c.dim, scores, g * kPage, 0, count, next);
  }
  for (int i = 0; i < Q; ++i) {
    for (int d = 0; d < c.dim; ++d) c.out[q0 + i][d] = 0.0f;
    if (first[i] < last[i])
      soften(scores[i], num, first[i], last[i], c.cap, c.maximum + q0 + i, c.total + q0 + i);
    else
      c.maximum[q0 + i] = -INFINITY, c.total[q0 + i] = 0.0f, last[i] = 0;
    if (last[i] == 0) high = 0;
  }
  // Tokens that all queries may see go together; those that only some see (left behind by a window, or later rows of
  // the block) one query at a time, so that a value that is not finite cannot leak into a row that must not see it.
  for (int g = low / kPage; g < pages; ++g) {
    const float* p[Q];
    for (int i = 0; i < Q; ++i) p[i] = scores[i] + g * kPage;
    const int from = both > g * kPage ? both - g * kPage : 0, joint = high - g * kPage < kPage ? high - g * kPage : kPage;
    for (int i = 0; i < Q; ++i) {
      const int begin = first[i] > g * kPage ? first[i] - g * kPage : 0;
      const int end = last[i] - g * kPage < kPage ? last[i] - g * kPage : kPage, stop = from < joint ? from : end;
      if (begin < stop) page_values<KV, 1>(p + i, c.values[g], c.dim, begin, stop, c.out + q0 + i);
    }
    if (from >= joint) continue;
    const uint8_t* next = q0 > 0 ? nullptr : g + 1 < pages ? c.values[g + 1] : c.next;
    page_values<KV, Q>(p, c.values[g], c.dim, from, joint, c.out + q0, next);
    for (int i = 0; i < Q; ++i) {
      const int end = last[i] - g * kPage < kPage ? last[i] - g * kPage : kPage;
      if (joint < end) page_values<KV, 1>(p + i, c.values[g], c.dim, joint, end, c.out + q0 + i);
    }
  }
}

template <int KV, int Q>
void split_tail(const Split& c, int q0, int num) {
  if (num == Q) return split_tile<KV, Q>(c, q0);
  if constexpr (Q > 1) split_tail<KV, Q - 1>(c, q0, num);
}

template <int KV>
void split_all(const Split& c) {
  int q0 = 0;
  for (; q0 + kQueries <= c.num; q0 += kQueries) split_tile<KV, kQueries>(c, q0);
  if (q0 < c.num) split_tail<KV, kQueries>(c, q0, c.num - q0);
}

void attend_split(int kv, const Split& c) {
  switch (kv) {
    case kKvF16: return split_all<kKvF16>(c);
    case kKvBF16: return split_all<kKvBF16>(c);
    case kKvF32: return split_all<kKvF32>(c);
    case kKvI8: return split_all<kKvI8>(c);
  }
}

// Merge one more split into a running (maximum, total, out).
void merge_split(float* maximum, float* total, float* out, float more_max, float more_total, const float* more, int dim) {
  if (more_total == 0.0f) return;  // saw nothing
  const float m = *maximum > more_max ? *maximum : more_max;
  float weight[16];
  F w = zero();
  store(weight, w);
  weight[0] = *maximum - m, weight[1] = more_max - m;
  w = exp(load(weight));
  store(weight, w);
  const F a = set(weight[0]), b = set(weight[1]);
  float sum[16];
  store(sum, fma(set(more_total), b, mul(set(*total), a)));
  *maximum = m, *total = sum[0];
  for (int d = 0; d < dim; d += 16) store(out + d, fma(load(more + d), b, mul(load(out + d), a)));
}

void finish_attention(float* out, float total, int dim) {
  const F t = set(total);
  for (int d = 0; d < dim; d += 16) store(out + d, div(load(out + d), t));
}

// Write one token's key (dim,) into column `at` of a page [dim][64], or its value into row `at` of [64][dim].
template <int KV>
void append_as(bool is_value, const float* x, int dim, int at, uint8_t* page) {
  const int64_t first = is_value ? at * dim : at, step = is_value ? 1 : kPage;
  if constexpr (KV == kKvI8) {
    float most = 0.0f;
    bool finite = true;
    for (int d = 0; d < dim; ++d) {
      const float size = std::fabs(x[d]);
      most = size > most ? size : most, finite = finite && size <= kLargest;
    }
    const float inverse = finite && most >= kSmallestMax ? 127.0f / most : 0.0f;
    for (int d = 0; d < dim; ++d)
      page[first + d * step] = uint8_t(int8_t(finite ? std::nearbyint(x[d] * inverse) : 0.0f));
    ((float*)(page + dim * kPage))[at] = finite ? most / 127.0f : bits_to_float(0x7fc00000);
    return;
  }
  for (int d = 0; d < dim; d += 16) {
    if constexpr (KV == kKvF32) {
      if (is_value)
        store((float*)page + first + d, load(x + d));
      else
        for (int i = 0; i < 16; ++i) ((float*)page)[first + (d + i) * kPage] = x[d + i];
    } else {
      uint16_t half[16];
      if constexpr (KV == kKvF16) store_half(half, load(x + d));
      for (int i = 0; i < 16; ++i) {
        if constexpr (KV == kKvBF16) half[i] = float_to_bf16(x[d + i]);
        ((uint16_t*)page)[first + (d + i) * step] = half[i];
      }
    }
  }
}

void append_kv(int kv, bool is_value, const float* x, int dim, int at, uint8_t* page) {
  switch (kv) {
    case kKvF16: return append_as<kKvF16>(is_value, x, dim, at, page);
    case kKvBF16: return append_as<kKvBF16>(is_value, x, dim, at, page);
    case kKvF32: return append_as<kKvF32>(is_value, x, dim, at, page);
    case kKvI8: return append_as<kKvI8>(is_value, x, dim, at, page);
  }
}

}  // namespace hk::HK_ISA
