#include "layers.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "products.h"

namespace hk {

const Acts& Workers::acts(int which, int64_t rows, int64_t k, bool with_float) {
  auto it = std::find_if(kept_.begin(), kept_.end(), [&](const Kept& e) { return e.which == which && e.k == k; });
  if (it == kept_.end()) it = kept_.insert(it, Kept{which, 0, k, false, nullptr});
  if (it->rows < rows || (with_float && !it->with_float)) {
    it->buffer = std::make_unique<ActsBuffer>(rows, k, with_float);
    it->rows = rows, it->with_float = with_float;
  }
  it->buffer->acts.stride = rows;
  return it->buffer->acts;
}

float* Workers::floats(int which, int64_t count) {
  if (count > num_floats_[which]) {
    floats_[which] = make_buffer<float>(count);
    num_floats_[which] = count;
  }
  return floats_[which].get();
}

void dense(Workers& w, const Kernels& k, const float* x, int64_t rows, const float* norm, int parts, float eps,
           const hk_matrix* const* matrices, int num, float* const* outs) {
  const int64_t size = matrices[0]->k;
  int64_t total = 0;
  bool with_float = false;
  for (int i = 0; i < num; ++i) total += groups_of(*matrices[i]), with_float |= is_float(*matrices[i]);
  const Acts& in = w.acts(0, rows, size, with_float);
  const int64_t own = round_up(size, kLanes);
  float* scratch = w.floats(0, own * w.pool->size());
  w.pool->run([&](int t) {
    const int threads = w.pool->size();
    take_in(k, x, rows, size, {norm, parts, eps}, in, part(in.k / kBlock, t, threads), scratch + t * own);
    w.pool->barrier();
    const Part mine = part(total, t, threads);
    int64_t begin = 0;
    for (int i = 0; i < num; ++i) {
      const int64_t groups = groups_of(*matrices[i]);
      product(k, *matrices[i], in, rows, {std::max<int64_t>(mine.first - begin, 0), std::min(mine.last - begin, groups)},
              outs[i]);
      begin += groups;
    }
  });
}

void mlp(Workers& w, const Kernels& k, const float* x, int64_t rows, const float* norm, float eps, const hk_matrix& gate,
         const hk_matrix& up, const hk_matrix& down, int act, float* out) {
  const int64_t size = gate.k, inner = gate.n, threads = w.pool->size();
  const Acts& in = w.acts(0, rows, size, is_float(gate) || is_float(up));
  const Acts& mid = w.acts(1, rows, inner, is_float(down));
  const int64_t own = round_up(size, kLanes);
  float* scratch = w.floats(0, own * threads);
  float* gates = w.floats(1, 2 * rows * inner);
  float* ups = gates + rows * inner;
  w.pool->run([&](int t) {
    take_in(k, x, rows, size, {norm, 1, eps}, in, part(in.k / kBlock, t, int(threads)), scratch + t * own);
    w.pool->barrier();
    const Part blocks = part(mid.k / kBlock, t, int(threads));  // two groups each; the last may have fewer
    const Part groups{2 * blocks.first, std::min(2 * blocks.last, groups_of(gate))};
    product(k, gate, in, rows, groups, gates);
    product(k, up, in, rows, groups, ups);
    const int64_t first = blocks.first * kBlock, count = std::min(inner, blocks.last * kBlock) - first;
    for (int64_t r = 0; r < rows && count > 0; ++r) {
      float* row = gates + r * inner;
      k.gated(act, row + first, ups + r * inner + first, count, row + first);
      k.quantize(row, inner, mid, r, blocks.first, blocks.last);
    }
    w.pool->barrier();
    const Part mine = part(groups_of(down), t, int(threads));
    product(k, down, mid, rows, mine, out);
    const int64_t end = std::min(down.n, mine.last * kLanes);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = mine.first * kLanes; i < end; ++i) out[r * down.n + i] += x[r * size + i];
  });
}

void ring_append(const Kernels& k, const float* keys, const float* values, const float* k_norm, float eps,
                 const float* turns, int64_t tokens, int num_kv_heads, int dim, float* ring, int64_t window, int64_t place) {
  const int64_t row = int64_t(num_kv_heads) * dim;
  for (int64_t i = 0; i < tokens; ++i) {
    float* to = ring + (place + i) % window * 2 * row;
    for (int64_t at = 0; at < row; at += dim) {
      k.rms_norm(keys + i * row + at, k_norm, dim, eps, to + at);
      if (turns) k.rotate(to + at, turns + i * dim, dim / 2, false);
    }
    std::memcpy(to + row, values + i * row, size_t(row) * 4);
  }
}

namespace {

enum Core { kMean, kGla, kDelta, kMamba2 };

// x / max(|x|, 1e-12), as torch's normalize.
void to_unit(const float* x, int64_t n, float* out) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += double(x[i]) * x[i];
  const float scale = float(1.0 / std::max(std::sqrt(sum), 1e-12));
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale;
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace

// Heads are shared out; the tokens of a head come one after the other.
void memory_write(Workers& w, const Kernels& k, int core, float* state, const float* keys, const float* values,
                  const float* strengths, const float* decays, const float* a_log, const float* dt_bias, int64_t tokens,
                  int heads, int width) {
  float* scratch = w.floats(0, int64_t(2 * width) * w.pool->size());
  w.pool->run([&](int t) {
    float *key = scratch + 2 * width * t, *pull = key + width;
    const Part mine = part(heads, t, w.pool->size());
    for (int64_t head = mine.first; head < mine.last; ++head)
      for (int64_t i = 0; i < tokens; ++i) {
        const int64_t at = i * heads + head;
        const float dt = softplus(decays[at] + dt_bias[head]), decay = -std::exp(a_log[head]) * dt;
        const float weight = core == kMean ? -std::expm1(decay) : core == kMamba2 ? dt : sigmoid(strengths[at]);
        to_unit(keys + at * width, width, key);
        k.memory_write(state + head * width * width, key, values + at * width, weight, std::exp(decay), core == kDelta,
                       width, width, pull);
      }
  });
}

void memory_read(Workers& w, const Kernels& k, const float* state, const float* queries, const float* gates,
                 const float* norm, float eps, int64_t slots, int heads, int width, float* out) {
  float* scratch = w.floats(0, int64_t(2 * width) * w.pool->size());
  w.pool->run([&](int t) {
    float *query = scratch + 2 * width * t, *found = query + width;
    const Part mine = part(heads * slots, t, w.pool->size());
    for (int64_t i = mine.first; i < mine.last; ++i) {
      const int64_t head = i / slots, at = (i % slots * heads + head) * width;
      to_unit(queries + at, width, query);
      k.memory_read(state + head * width * width, query, 1.0f / std::sqrt(float(width)), width, width, found);
      k.rms_norm(found, norm, width, eps, query);
      k.gated(kSilu, gates + at, query, width, out + at);
    }
  });
}

void draft_layer(Workers& w, const Kernels& k, const hk_draft_layer& l, const float* x, int64_t num_rows, int64_t num_slots,
                 int64_t first, const hk_draft_row* rows, float* out) {
  const int64_t dim = l.q->k, count = num_slots - first, all = num_rows * num_slots, some = num_rows * count;
  const int64_t heads = int64_t(l.num_heads) * l.head_dim, kv = int64_t(l.num_kv_heads) * l.head_dim;
  const int64_t read = int64_t(l.memory_heads) * l.memory_width;
  float* q = w.floats(2, all * (heads + 2 * kv + 2 * read) + some * (heads + read + 2 * dim));
  float *keys = q + all * heads, *values = keys + all * kv, *queries = values + all * kv, *gates = queries + all * read;
  float *mixed = gates + all * read, *found = mixed + some * heads, *y = found + some * read, *sum = y + some * dim;

  const hk_matrix* inputs[] = {l.q, l.k, l.v, l.memory_q, l.memory_gate};
  float* products[] = {q, keys, values, queries, gates};
  dense(w, k, x, all, l.norm, 1, l.eps, inputs, read ? 5 : 3, products);
  for (int64_t b = 0; b < num_rows; ++b) {
    const hk_draft_row& row = rows[b];
    const int64_t at = b * num_slots;
    block_attention(w, k, {l.num_heads, l.num_kv_heads, l.head_dim, int32_t(num_slots), int32_t(count), l.causal,
                           q + (at + first) * heads, keys + at * kv, values + at * kv, l.q_norm, l.k_norm, row.ring,
                           row.window, row.first, row.held, row.key_turns, row.slot_turns, l.head_eps,
                           1.0f / std::sqrt(float(l.head_dim)), mixed + b * count * heads});
    if (read)
      memory_read(w, k, row.memory, queries + (at + first) * read, gates + (at + first) * read, l.memory_norm,
                  l.memory_eps, count, l.memory_heads, l.memory_width, found + b * count * read);
  }
  auto add = [&](const hk_matrix* m, const float* in) {
    dense(w, k, in, some, nullptr, 1, 0.0f, &m, 1, &y);
    for (int64_t i = 0; i < some * dim; ++i) sum[i] += y[i];
  };
  for (int64_t b = 0; b < num_rows; ++b)
    std::memcpy(sum + b * count * dim, x + (b * num_slots + first) * dim, size_t(count * dim) * 4);
  add(l.o, mixed);
  if (read) add(l.memory_out, found);
  mlp(w, k, sum, some, l.mlp_norm, l.mlp_eps, *l.gate, *l.up, *l.down, 0, out);
}

}  // namespace hk
