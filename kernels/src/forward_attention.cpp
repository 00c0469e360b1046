// Attention of a forward: how its work is cut into items, the items, and what merges them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "forward.h"
#include "forward_space.h"

namespace hk {
namespace {
constexpr int kLeastChunk = 4;  // rows of an item where there are few
}

// Few sequences: share the splits out among the threads and merge them afterwards. Many: one item does all its splits.
void Forward::make_plans(const Batch& batch) {
  const int64_t enough = 4 * pool_->size();  // items, so that no thread is idle for long
  auto count_items = [&](int32_t chunk) {
    int64_t chunks = 0;
    for (int i = 0; i < batch.num_seqs; ++i) chunks += (batch.lengths[i] + chunk - 1) / chunk;
    return chunks * c_.num_kv_heads;
  };
  int64_t splits = 1;
  for (int i = 0; i < batch.num_seqs; ++i)
    splits = std::max(splits, (model_.caches.length(batch.seqs[i]) + batch.lengths[i] - 1) / kSplit + 1);
  split_ = splits > 1 && count_items(kRowChunk) < enough;
  num_splits_ = splits;
  merge_later_ = split_ || c_.num_heads / c_.num_kv_heads * c_.head_dim % kBlock != 0;
  int32_t chunk = kRowChunk;
  while (chunk > kLeastChunk && count_items(chunk) * (split_ ? splits : 1) < enough) chunk /= 2;
  if (split_) {
    const int64_t size = int64_t(rows_.size()) * c_.num_heads * splits * (c_.head_dim + 2);
    if (size > space_->partial_size) space_->partial = make_buffer<float>(size), space_->partial_size = size;
  }
  plans_.clear();
  for (const Layer& layer : model_.layers) {
    if (std::any_of(plans_.begin(), plans_.end(), [&](const Plan& p) { return p.window == layer.window; })) continue;
    Plan plan{layer.window, {}};
    int32_t row = 0;
    for (int i = 0; i < batch.num_seqs; ++i)
      for (int32_t done = 0; done < batch.lengths[i];) {
        const int32_t count = std::min(chunk, batch.lengths[i] - done);
        const int64_t from = layer.window ? std::max<int64_t>(0, rows_[size_t(row)].pos - layer.window + 1) : 0;
        const int32_t first = int32_t(from / kSplit), end = int32_t(rows_[size_t(row + count - 1)].pos / kSplit) + 1;
        for (int32_t head = 0; head < c_.num_kv_heads; ++head)
          for (int32_t s = first; s < end; s += split_ ? 1 : end - first)
            plan.items.push_back({batch.seqs[i], row, count, head, s, split_ ? s + 1 : end});
        row += count, done += count;
      }
    plans_.push_back(std::move(plan));
  }
}

void Forward::attend(int index, int t) {
  Space& s = *space_;
  const Layer& layer = model_.layers[size_t(index)];
  const Plan& plan = *std::find_if(plans_.begin(), plans_.end(), [&](const Plan& p) { return p.window == layer.window; });
  const int64_t dim = c_.head_dim, group = c_.num_heads / c_.num_kv_heads;
  float* scratch = s.scratch.get() + t * s.own + s.own - (kMaxQueries * kSplit + s.queries * (dim + 2));
  float *out = scratch + kMaxQueries * kSplit, *maximum = out + s.queries * dim, *total = maximum + s.queries;
  auto& [queries, outs, positions, best, sums] = s.lists[size_t(t)];
  for (int64_t n; (n = next_.fetch_add(1, std::memory_order_relaxed)) < int64_t(plan.items.size());) {
    const Item& item = plan.items[size_t(n)];
    const int count = int(item.num_rows * group);
    for (int q = 0; q < count; ++q) {
      const int64_t row = item.row + q / group, head = item.head * group + q % group;
      queries[size_t(q)] = s.qkv.get() + row * s.width + head * dim;
      positions[size_t(q)] = rows_[size_t(row)].pos;
      outs[size_t(q)] = out + q * dim;
      best[size_t(q)] = -INFINITY, sums[size_t(q)] = 0.0f;
      if (!split_) std::fill_n(s.attn.get() + row * s.heads + head * dim, dim, 0.0f);
    }
    for (int32_t sp = item.first; sp < item.last; ++sp) {
      const uint8_t *keys[kSplit / kPage] = {}, *values[kSplit / kPage] = {};
      const int64_t last_page = positions[size_t(count - 1)] / kPage;
      for (int64_t g = 0; g < kSplit / kPage; ++g) {
        const int64_t page = sp * (kSplit / kPage) + g;
        if (page > last_page) break;
        keys[g] = model_.caches.keys(item.seq, page, index, item.head);
        values[g] = model_.caches.values(item.seq, page, index, item.head);
      }
      const int64_t after = (sp + 1) * (kSplit / kPage);
      const uint8_t* next = after <= last_page ? model_.caches.keys(item.seq, after, index, item.head) : nullptr;
      const Split one{keys, values, next, int64_t(sp) * kSplit, int(dim), layer.window, c_.attn_cap, count, queries.data(),
                      positions.data(), outs.data(), maximum, total, scratch};
      k_.attend_split(c_.kv_type, one);
      for (int q = 0; q < count; ++q) {
        const int64_t row = item.row + q / group, head = item.head * group + q % group;
        if (split_) {
          float* to = s.partial.get() + ((row * c_.num_heads + head) * num_splits_ + sp) * (dim + 2);
          to[0] = maximum[q], to[1] = total[q];
          std::memcpy(to + 2, outs[size_t(q)], size_t(dim) * 4);
        } else {
          float* to = s.attn.get() + row * s.heads + head * dim;
          k_.merge_split(&best[size_t(q)], &sums[size_t(q)], to, maximum[q], total[q], outs[size_t(q)], int(dim));
          if (sp + 1 == item.last) k_.finish_attention(to, sums[size_t(q)], int(dim));
        }
      }
    }
    for (int64_t row = item.row; !merge_later_ && row < item.row + item.num_rows; ++row)
      k_.quantize(s.attn.get() + row * s.heads, s.heads, s.in_heads->acts, row, item.head * group * dim / kBlock,
                  (item.head + 1) * group * dim / kBlock);
  }
}

// What attention left to do: merge splits, quantise.
void Forward::merge(const Layer& layer, int t) {
  Space& s = *space_;
  const int64_t dim = c_.head_dim, rows = int64_t(rows_.size());
  const int64_t parts = dim % kBlock ? 1 : c_.num_heads, heads = c_.num_heads / parts;  // heads of one item
  const Part p = part(rows * parts, t, pool_->size());
  for (int64_t i = p.first; i < p.last; ++i) {
    const int64_t row = i % rows, head0 = i / rows * heads;
    float* out = s.attn.get() + row * s.heads;
    for (int64_t head = head0; split_ && head < head0 + heads; ++head) {
      float best = -INFINITY, sum = 0.0f, *to = out + head * dim;
      std::fill_n(to, dim, 0.0f);
      const int64_t pos = rows_[size_t(row)].pos;
      const int64_t first = layer.window ? std::max<int64_t>(0, pos - layer.window + 1) / kSplit : 0;
      for (int64_t sp = first; sp <= pos / kSplit; ++sp) {
        const float* from = s.partial.get() + ((row * c_.num_heads + head) * num_splits_ + sp) * (dim + 2);
        k_.merge_split(&best, &sum, to, from[0], from[1], from + 2, int(dim));
      }
      k_.finish_attention(to, sum, int(dim));
    }
    const int64_t blocks = s.in_heads->acts.k / kBlock / parts;
    k_.quantize(out, s.heads, s.in_heads->acts, row, i / rows * blocks, (i / rows + 1) * blocks);
  }
}

}  // namespace hk
