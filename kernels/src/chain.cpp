// Draft tokens along a block, with a GRU's correction from token to token or without.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "layers.h"
#include "products.h"

namespace hk {
namespace {

struct Correction {  // memory of GRU steps of one row
  const Acts &in, &own, &both, &mid;
  float *from_in, *from_own, *mixed;
  const float* ones;
  float* rows;  // of each thread: `each` floats
  int64_t each;
};

Correction correction_space(Workers& w, const hk_matrix& gru_in, const hk_matrix& gru_own, const hk_matrix& down,
                            const hk_matrix& up, float* floats) {
  const int64_t dim = gru_in.k, n = gru_own.k, rank = down.n, each = 2 * round_up(dim + n, 16) + round_up(rank, 16);
  float* ones = floats + 6 * n + rank;
  std::fill_n(ones, std::max(dim, rank), 1.0f);
  return {w.acts(0, 1, dim, is_float(gru_in)), w.acts(1, 1, n, is_float(gru_own)), w.acts(2, 1, dim + n, is_float(down)),
          w.acts(3, 1, rank, is_float(up)), floats, floats + 3 * n, floats + 6 * n, ones, ones + std::max(dim, rank), each};
}
int64_t correction_floats(const Workers& w, const hk_matrix& gru_in, const hk_matrix& gru_own, const hk_matrix& down) {
  const int64_t dim = gru_in.k, n = gru_own.k, rank = down.n;
  return 6 * n + rank + std::max(dim, rank) + w.pool->size() * (2 * round_up(dim + n, 16) + round_up(rank, 16));
}

// Four products in a chain, each a phase of the pool; called by all threads.
void correct(Pool& pool, const Kernels& k, const Correction& c, const float* previous, const float* hidden, float eps,
             const hk_matrix& gru_in, const hk_matrix& gru_own, const hk_matrix& down, const hk_matrix& up, float* state,
             float* out, int t) {
  const int of = pool.size();
  const int64_t dim = gru_in.k, n = gru_own.k, rank = down.n;
  float *row = c.rows + c.each * t, *next = row + dim, *act = row + 2 * round_up(dim + n, 16);
  take_in(k, previous, 1, dim, {c.ones, 1, eps}, c.in, part(c.in.k / kBlock, t, of), row);
  take_in(k, state, 1, n, {nullptr, 1, 0.0f}, c.own, part(c.own.k / kBlock, t, of), nullptr);
  pool.barrier();
  product(k, gru_in, c.in, 1, part(groups_of(gru_in), t, of), c.from_in);
  product(k, gru_own, c.own, 1, part(groups_of(gru_own), t, of), c.from_own);
  pool.barrier();
  // Every thread makes the new state for itself; the first keeps it.
  std::memcpy(next, state, size_t(n) * 4);
  k.gru_step(c.from_in, c.from_own, n, next);
  k.rms_norm(hidden, c.ones, dim, eps, row);
  take_in(k, row, 1, dim + n, {nullptr, 1, 0.0f}, c.both, part(c.both.k / kBlock, t, of), nullptr);
  pool.barrier();
  if (t == 0) std::memcpy(state, next, size_t(n) * 4);
  product(k, down, c.both, 1, part(groups_of(down), t, of), c.mixed);
  pool.barrier();
  k.gated(kSilu, c.mixed, c.ones, rank, act);
  take_in(k, act, 1, rank, {nullptr, 1, 0.0f}, c.mid, part(c.mid.k / kBlock, t, of), nullptr);
  pool.barrier();
  const Part groups = part(groups_of(up), t, of);
  product(k, up, c.mid, 1, groups, out);
  for (int64_t i = groups.first * kLanes; i < std::min(up.n, groups.last * kLanes); ++i) out[i] += hidden[i];
}

}  // namespace

int64_t draft_chain(Workers& w, const Kernels& k, const hk_draft_chain& a) {
  if (a.num == 0) return 0;
  const hk_matrix& head = *a.head;
  const int64_t dim = head.k, n = head.n, more = a.num_more, width = a.gru_in ? a.gru_own->k : 0;
  const int64_t together = a.gru_in ? 1 : a.num;  // rows whose logits can be made at once
  const int of = w.pool->size();
  const Acts& in = w.acts(4, together, dim, is_float(head));
  float* logits = w.floats(1, together * (n + more) + 2 * dim + width);
  float *extra = logits + together * n, *previous = extra + together * more, *fixed = previous + dim, *state = fixed + dim;
  std::fill_n(state, width, 0.0f);
  float* floats = w.floats(0, a.gru_in ? correction_floats(w, *a.gru_in, *a.gru_own, *a.down) : 1);
  std::unique_ptr<Correction> space;
  if (a.gru_in)
    space = std::make_unique<Correction>(correction_space(w, *a.gru_in, *a.gru_own, *a.down, *a.up, floats));

  auto make_logits = [&](const float* x, int t) {
    take_in(k, x, together, dim, {nullptr, 1, 0.0f}, in, part(in.k / kBlock, t, of), nullptr);
    const Part mine = part(more, t, of);
    k.dots(x, together, a.rows, a.more + mine.first, mine.last - mine.first, dim, extra + mine.first, more);
    for (int64_t r = 0; a.more_bias && r < together; ++r)
      for (int64_t j = mine.first; j < mine.last; ++j) extra[r * more + j] += a.more_bias[j];
    w.pool->barrier();
    product(k, head, in, together, part(groups_of(head), t, of), logits);
    w.pool->barrier();
  };
  auto choose = [&](int64_t i, int64_t row) {
    int32_t id = -1;
    float best = 0;
    k.top(logits + row * n, n, 0, 1, &id, &best);
    k.top(extra + row * more, more, int32_t(n), 1, &id, &best);
    a.shares[i] = 1.0f / (k.sum_exp(logits + row * n, n, best) + k.sum_exp(extra + row * more, more, best));
    a.tokens[i] = id < n ? a.head_ids[id] : a.more_ids[id - n];
  };
  auto correct_row = [&](int64_t i, int t) {
    if (t == 0) embed(a, dim, i ? a.tokens[i - 1] : a.anchor, previous);
    w.pool->barrier();
    correct(*w.pool, k, *space, previous, a.hidden + i * dim, a.eps, *a.gru_in, *a.gru_own, *a.down, *a.up, state, fixed, t);
    w.pool->barrier();
  };

  w.pool->run([&](int t) {
    if (!a.gru_in) {
      make_logits(a.hidden, t);
      const Part mine = part(a.num, t, of);
      for (int64_t i = mine.first; i < mine.last; ++i) choose(i, i);
      return;
    }
    for (int64_t i = 0; i < a.num; ++i) {
      correct_row(i, t);
      make_logits(fixed, t);
      if (t == 0) choose(i, 0);
      w.pool->barrier();
      if (!std::isfinite(a.shares[i])) return;
    }
  });
  return std::find_if(a.shares, a.shares + a.num, [](float share) { return !std::isfinite(share); }) - a.shares;
}

}  // namespace hk
