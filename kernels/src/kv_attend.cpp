// Attention of given queries to the cached keys and values of a sequence, where they lie: what drafters read that keep
// none of their own. The work goes as a forward's does, in splits of 256 tokens from position 0, merged in order.
#include <algorithm>
#include <cmath>

#include "kv_attend.h"

namespace hk {
namespace {
constexpr int kChunk = 6;  // queries of an item: what the widest kernels take at once
}

void kv_attend(Workers& w, const Kernels& k, const Model& model, const hk_kv_attention& a) {
  const Config& c = model.config;
  const int64_t dim = c.head_dim, group = a.num_heads / c.num_kv_heads, num = a.num_queries * group;
  const int64_t chunks = (num + kChunk - 1) / kChunk, own = (kMaxQueries * kSplit + kChunk * (dim + 4) + 15) / 16 * 16;
  float* space = w.floats(0, own * w.pool->size());
  w.pool->run([&](int t) {
    const Part items = part(c.num_kv_heads * chunks, t, w.pool->size());
    float *scratch = space + own * t, *some = scratch + kMaxQueries * kSplit, *most = some + kChunk * dim;
    float *total = most + kChunk, *best = total + kChunk, *sums = best + kChunk;
    for (int64_t i = items.first; i < items.last; ++i) {
      const int64_t head = i / chunks, from = i % chunks * kChunk;
      const int count = int(std::min<int64_t>(kChunk, num - from));
      const float* queries[kChunk];
      float *outs[kChunk], *to[kChunk], *lse[kChunk];
      int64_t positions[kChunk];
      for (int q = 0; q < count; ++q) {
        const int64_t at = (from + q) / group * a.num_heads + head * group + (from + q) % group;
        queries[q] = a.q + at * dim, to[q] = a.out + at * dim, lse[q] = a.lse + at;
        outs[q] = some + q * dim, positions[q] = a.last - 1;
        best[q] = -INFINITY, sums[q] = 0.0f;
        std::fill_n(to[q], dim, 0.0f);
      }
      for (int64_t split = a.first / kSplit; split * kSplit < a.last; ++split) {
        const uint8_t *keys[kSplit / kPage] = {}, *values[kSplit / kPage] = {};
        for (int64_t g = 0; g < kSplit / kPage; ++g) {
          const int64_t page = split * (kSplit / kPage) + g;
          if (page * kPage >= a.last) break;
          keys[g] = model.caches.keys(a.seq, page, a.layer, int(head));
          values[g] = model.caches.values(a.seq, page, a.layer, int(head));
        }
        k.attend_split(c.kv_type, {keys, values, nullptr, split * kSplit, int(dim), int(a.last - a.first), 0.0f, count,
                                   queries, positions, outs, most, total, scratch});
        for (int q = 0; q < count; ++q) k.merge_split(best + q, sums + q, to[q], most[q], total[q], outs[q], int(dim));
      }
      for (int q = 0; q < count; ++q) {
        k.finish_attention(to[q], sums[q], int(dim));
        *lse[q] = best[q] + std::log(sums[q]);
      }
    }
  });
}

}  // namespace hk
