// Scratch memory of a forward, kept for the next ones that need no more.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "forward.h"
#include "products.h"

namespace hk {

constexpr int kRowChunk = 16;  // rows of an attention item, at most

struct Forward::Space {
  Space(const Model& m, int64_t num_rows, int num_threads)
      : rows(num_rows),
        threads(num_threads),
        heads(int64_t(m.config.num_heads) * m.config.head_dim),
        width(heads + 2 * int64_t(m.config.num_kv_heads) * m.config.head_dim),
        inner(round_up(m.config.intermediate, kBlock)),
        queries(kRowChunk * m.config.num_heads / m.config.num_kv_heads),
        own(round_up(std::max<int64_t>(m.config.hidden, m.config.head_dim), 16) + kMaxQueries * kSplit +
            queries * (m.config.head_dim + 2)),
        x(make_buffer<float>(rows * m.config.hidden)),
        y(make_buffer<float>(rows * m.config.hidden)),
        qkv(make_buffer<float>(rows * width)),
        attn(make_buffer<float>(rows * heads)),
        gate(make_buffer<float>(rows * inner)),
        up(make_buffer<float>(rows * inner)),
        scratch(make_buffer<float>(threads * own)),
        lists(size_t(threads), Lists(size_t(queries))) {
    bool hidden_float = is_float(m.head), heads_float = false, inner_float = false;
    for (const Layer& l : m.layers) {
      for (int i : {kQuery, kKey, kValue, kGate, kUp}) hidden_float |= is_float(l.matrix[i]);
      heads_float |= is_float(l.matrix[kOutput]), inner_float |= is_float(l.matrix[kDown]);
    }
    in_hidden = std::make_unique<ActsBuffer>(rows, m.config.hidden, hidden_float);
    in_heads = std::make_unique<ActsBuffer>(rows, heads, heads_float);
    in_inner = std::make_unique<ActsBuffer>(rows, m.config.intermediate, inner_float);
  }

  int64_t bytes() const {
    const int64_t floats = 2 * in_hidden->acts.k + width + heads + 2 * inner;
    return 4 * (rows * floats + threads * own + partial_size + logits_size) + in_hidden->bytes + in_heads->bytes +
           in_inner->bytes;
  }

  int64_t rows, threads, heads, width, inner, queries, own;
  Buffer<float> x, y, qkv, attn, gate, up, scratch, partial, logits;
  int64_t partial_size = 0, logits_size = 0;
  struct Lists {  // of the queries of an attention item
    explicit Lists(size_t n) : queries(n), outs(n), positions(n), best(n), sums(n) {}
    std::vector<const float*> queries;
    std::vector<float*> outs;
    std::vector<int64_t> positions;
    std::vector<float> best, sums;
  };
  std::vector<Lists> lists;  // of each thread
  std::vector<int32_t> top_ids;
  std::vector<float> top_values, totals;
  std::unique_ptr<ActsBuffer> in_hidden, in_heads, in_inner;
};

}  // namespace hk
