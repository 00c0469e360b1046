// Attention of a draft block to its context and itself. The context goes, 256 tokens after 256, into pages as the
// target's cache has them, and through the same kernel; threads share out the tokens of all KV heads, then the queries.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "layers.h"

namespace hk {
namespace {

constexpr int kChunk = 6;  // queries of an item: what the widest kernels take at once

class BlockAttention {
 public:
  BlockAttention(Workers& w, const Kernels& k, const hk_block_attention& a)
      : pool_(*w.pool), k_(k), a_(a), dim_(a.head_dim), group_(a.num_heads / a.num_kv_heads) {
    num_ = a.num_queries * group_;
    const int64_t heads = a.num_kv_heads, all = heads * num_;
    own_ = (kMaxQueries * kSplit + kChunk * (dim_ + 2) + dim_ + 15) / 16 * 16;
    keys_ = w.floats(0, 2 * heads * kSplit * dim_ + all * (dim_ + 2) + own_ * pool_.size());
    values_ = keys_ + heads * kSplit * dim_, turned_ = values_ + heads * kSplit * dim_;
    best_ = turned_ + all * dim_, sums_ = best_ + all, scratch_ = sums_ + all;
  }

  void thread(int t) {
    const int64_t heads = a_.num_kv_heads, tokens = a_.held + a_.num_slots, chunks = (num_ + kChunk - 1) / kChunk;
    const int of = pool_.size();
    float* own = scratch_ + own_ * t;
    const Part queries = part(heads * num_, t, of), items = part(heads * chunks, t, of);
    for (int64_t i = queries.first; i < queries.last; ++i) take_query(i);
    for (int64_t begin = 0; begin < tokens; begin += kSplit) {
      const int64_t count = std::min<int64_t>(kSplit, tokens - begin);
      const Part taken = part(heads * count, t, of);
      for (int64_t i = taken.first; i < taken.last; ++i) take_token(i / count, begin, begin + i % count, own);
      pool_.barrier();
      for (int64_t i = items.first; i < items.last; ++i) attend(i / chunks, i % chunks * kChunk, begin, own);
      pool_.barrier();
    }
    for (int64_t i = queries.first; i < queries.last; ++i) k_.finish_attention(out(i), sums_[i], int(dim_));
  }

 private:
  // Query i of head i / num_: the slots of a head of the group lie `group_` apart.
  float* out(int64_t i) const {
    const int64_t head = i / num_, q = i % num_;
    return a_.out + (q / group_ * a_.num_heads + head * group_ + q % group_) * dim_;
  }
  int64_t slot(int64_t q) const { return a_.num_slots - a_.num_queries + q / group_; }

  void take_query(int64_t i) {
    float *to = turned_ + i * dim_, *sum = out(i);
    k_.rms_norm(a_.q + (sum - a_.out), a_.q_norm, dim_, a_.eps, to);  // queries lie as their results do
    k_.rotate(to, a_.slot_turns + slot(i % num_) * dim_, dim_ / 2, false);
    k_.scale_and_cap(to, dim_, a_.scale, 0.0f);
    best_[i] = -INFINITY, sums_[i] = 0.0f;
    std::fill_n(sum, dim_, 0.0f);
  }

  void take_token(int64_t head, int64_t begin, int64_t token, float* row) {
    const int64_t slot = token - a_.held, at = token - begin, place = (head * kSplit + at / kPage * kPage) * dim_;
    const float *value, *turns;
    if (slot < 0) {
      const float* key = a_.ring + ((a_.first + token) % a_.window * 2 * a_.num_kv_heads + head) * dim_;
      value = key + a_.num_kv_heads * dim_;
      turns = a_.key_turns ? a_.key_turns + token * dim_ : nullptr;
      std::memcpy(row, key, size_t(dim_) * 4);
    } else {
      value = a_.v + (slot * a_.num_kv_heads + head) * dim_;
      turns = a_.slot_turns + slot * dim_;
      k_.rms_norm(a_.k + (slot * a_.num_kv_heads + head) * dim_, a_.k_norm, dim_, a_.eps, row);
    }
    if (turns) k_.rotate(row, turns, dim_ / 2, false);
    k_.append_kv(kKvF32, false, row, int(dim_), int(at % kPage), reinterpret_cast<uint8_t*>(keys_ + place));
    k_.append_kv(kKvF32, true, value, int(dim_), int(at % kPage), reinterpret_cast<uint8_t*>(values_ + place));
  }

  void attend(int64_t head, int64_t first, int64_t begin, float* own) {
    const int count = int(std::min<int64_t>(kChunk, num_ - first));
    const uint8_t *keys[kSplit / kPage], *values[kSplit / kPage];
    for (int64_t g = 0; g < kSplit / kPage; ++g) {
      keys[g] = reinterpret_cast<uint8_t*>(keys_ + (head * kSplit + g * kPage) * dim_);
      values[g] = reinterpret_cast<uint8_t*>(values_ + (head * kSplit + g * kPage) * dim_);
    }
    const float* queries[kChunk];
    float* outs[kChunk];
    int64_t positions[kChunk];
    float *some = own + kMaxQueries * kSplit, *most = some + kChunk * dim_, *total = most + kChunk;
    for (int q = 0; q < count; ++q) {
      queries[q] = turned_ + (head * num_ + first + q) * dim_;
      outs[q] = some + q * dim_;
      positions[q] = a_.held + (a_.causal ? slot(first + q) : a_.num_slots - 1);  // else it sees all of the block
    }
    k_.attend_split(kKvF32, {keys, values, nullptr, begin, int(dim_), 0, 0.0f, count, queries, positions, outs, most, total,
                             own});
    for (int q = 0; q < count; ++q) {
      const int64_t i = head * num_ + first + q;
      k_.merge_split(best_ + i, sums_ + i, out(i), most[q], total[q], outs[q], int(dim_));
    }
  }

  Pool& pool_;
  const Kernels& k_;
  const hk_block_attention& a_;
  const int64_t dim_, group_;
  int64_t num_, own_;
  float *keys_, *values_, *turned_, *best_, *sums_, *scratch_;
};

}  // namespace

void block_attention(Workers& w, const Kernels& k, const hk_block_attention& a) {
  BlockAttention block(w, k, a);
  w.pool->run([&](int t) { block.thread(t); });
}

}  // namespace hk
