#include "forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "forward_space.h"

namespace hk {
namespace {
constexpr int64_t kTopPiece = 4096;  // columns of the logits that are searched at once
}  // namespace

Forward::Forward(Model& model, const Kernels& kernels, Workers& workers)
    : model_(model), c_(model.config), k_(kernels), pool_(workers.pool) {}

void Forward::set_threads(int num_threads) {
  if (num_threads != pool_->size()) pool_ = std::make_unique<Pool>(num_threads);
}

int64_t Forward::scratch_bytes() const { return space_ ? space_->bytes() : 0; }

bool Forward::run(const Batch& batch) {
  int64_t rows = 0;
  for (int i = 0; i < batch.num_seqs; ++i) {
    if (!model_.caches.reserve(batch.seqs[i], model_.caches.length(batch.seqs[i]) + batch.lengths[i])) return false;
    rows += batch.lengths[i];
  }
  try {
    make_space(rows);
    prepare(batch);
    pool_->run([&](int t) { thread(batch, t); });
  } catch (const std::exception&) {
    return false;
  }
  for (int i = 0; i < batch.num_seqs; ++i)
    model_.caches.set_length(batch.seqs[i], model_.caches.length(batch.seqs[i]) + batch.lengths[i]);
  return true;
}

void Forward::make_space(int64_t rows) {
  if (!space_ || space_->rows < rows || space_->threads < pool_->size())
    space_ = std::make_shared<Space>(model_, std::max(rows, space_ ? space_->rows : 0), pool_->size());
  for (auto& in : {space_->in_hidden.get(), space_->in_heads.get(), space_->in_inner.get()}) in->acts.stride = rows;
}

bool Forward::head(const float* hidden, int64_t rows, float* logits) {
  try {
    make_space(rows);
    const Acts& in = space_->in_hidden->acts;
    pool_->run([&](int t) {
      const Part p = part(rows, t, pool_->size());
      for (int64_t r = p.first; r < p.last; ++r) k_.quantize(hidden + r * c_.hidden, c_.hidden, in, r, 0, in.k / kBlock);
      pool_->barrier();
      head_part(rows, logits, t);
    });
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

void Forward::prepare(const Batch& batch) {
  rows_.clear(), wanted_.clear();
  int64_t last = 0;
  for (int i = 0; i < batch.num_seqs; ++i) {
    const int64_t begin = model_.caches.length(batch.seqs[i]);
    for (int64_t j = 0; j < batch.lengths[i]; ++j) {
      if (batch.logits_mode == 2 || (batch.logits_mode == 1 && j + 1 == batch.lengths[i])) wanted_.push_back(int64_t(rows_.size()));
      rows_.push_back({batch.seqs[i], begin + j});
    }
    last = std::max(last, begin + batch.lengths[i]);
  }
  rotations_.resize(model_.frequencies.size());
  const int64_t half = c_.rope_dim / 2;
  for (size_t kind = 0; kind < rotations_.size(); ++kind) {
    std::vector<float>& table = rotations_[kind];
    for (int64_t pos = int64_t(table.size()) / (2 * std::max<int64_t>(half, 1)); pos < last && half; ++pos)
      for (int64_t i = 0; i < 2 * half; ++i) {
        const double angle = double(pos) * model_.frequencies[kind][size_t(i % half)];
        table.push_back(float(i < half ? std::cos(angle) : std::sin(angle)) * c_.rope_scale);
      }
  }
  make_plans(batch);
  const int64_t wanted = int64_t(wanted_.size()), pieces = (c_.vocab + kTopPiece - 1) / kTopPiece;
  space_->top_ids.resize(size_t(wanted * pieces * std::max(batch.num_top, 1)));
  space_->top_values.resize(space_->top_ids.size());
  space_->totals.resize(size_t(wanted * pieces));
  if (!batch.logits && wanted * c_.vocab > space_->logits_size)
    space_->logits = make_buffer<float>(wanted * c_.vocab), space_->logits_size = wanted * c_.vocab;
}

void Forward::thread(const Batch& batch, int t) {
  Pool& pool = *pool_;
  Space& s = *space_;
  embed(batch, t);
  pool.barrier();
  for (int i = 0; i < c_.num_layers; ++i) {
    const Layer& layer = model_.layers[size_t(i)];
    if (i > 0) tap(batch, i - 1, t);
    norm(layer.vector[kAttnNorm], nullptr, t);
    pool.barrier();
    project(i, t);
    if (t == 0) next_.store(0, std::memory_order_relaxed);
    pool.barrier();
    attend(i, t);
    pool.barrier();
    if (merge_later_) {
      merge(layer, t);
      pool.barrier();
    }
    add_to_stream(layer.matrix[kOutput], s.in_heads->acts, layer.vector[kAttnPostNorm], t);
    pool.barrier();
    norm(layer.vector[kFfnNorm], nullptr, t);
    pool.barrier();
    feed(layer, t);
    pool.barrier();
    add_to_stream(layer.matrix[kDown], s.in_inner->acts, layer.vector[kFfnPostNorm], t);
    pool.barrier();
  }
  tap(batch, c_.num_layers - 1, t);
  finish(batch, t);
}

void Forward::embed(const Batch& batch, int t) {
  const Part p = part(int64_t(rows_.size()), t, pool_->size());
  for (int64_t r = p.first; r < p.last; ++r) {
    float* x = space_->x.get() + r * c_.hidden;
    unpack_at(model_.embedding_type, c_.hidden, model_.embedding, batch.tokens[r], x);
    if (c_.embed_scale != 1.0f)
      for (int64_t i = 0; i < c_.hidden; ++i) x[i] *= c_.embed_scale;
  }
}

// Rows normed and quantised, all of them or those listed. Threads share out the blocks, each norming whole rows for
// itself, since two threads that write to neighbouring rows would fight over cache lines; or many rows, 16 at a time.
void Forward::norm(const float* weight, const std::vector<int64_t>* listed, int t) {
  Space& s = *space_;
  const Acts& in = s.in_hidden->acts;
  const int64_t rows = int64_t(listed ? listed->size() : rows_.size()), threads = pool_->size();
  const bool many = rows >= 32 * threads;
  const Part tiles = many ? part((rows + 15) / 16, t, int(threads)) : Part{0, (rows + 15) / 16};
  const Part blocks = many ? Part{0, in.k / kBlock} : part(in.k / kBlock, t, int(threads));
  float* normed = s.scratch.get() + t * s.own;
  for (int64_t i = tiles.first * 16; i < std::min(rows, tiles.last * 16) && blocks.first < blocks.last; ++i) {
    k_.rms_norm(s.x.get() + (listed ? (*listed)[size_t(i)] : i) * c_.hidden, weight, c_.hidden, c_.eps, normed);
    k_.quantize(normed, c_.hidden, in, i, blocks.first, blocks.last);
  }
}

// Queries, keys and values. A thread computes whole heads, which it then norms, rotates and writes to their pages.
void Forward::project(int index, int t) {
  Space& s = *space_;
  const Layer& layer = model_.layers[size_t(index)];
  const int64_t dim = c_.head_dim, rows = int64_t(rows_.size());
  const Part heads = part(c_.num_heads + 2 * c_.num_kv_heads, t, pool_->size());
  int64_t begin = 0;
  for (int slot : {kQuery, kKey, kValue}) {
    const int64_t count = slot == kQuery ? c_.num_heads : c_.num_kv_heads;
    const int64_t first = std::max<int64_t>(heads.first - begin, 0), last = std::min(heads.last - begin, count);
    if (first < last)
      product(k_, layer.matrix[slot], s.in_hidden->acts, rows, {first * dim / kLanes, last * dim / kLanes},
             s.qkv.get() + begin * dim, s.width);
    for (int64_t head = first; head < last; ++head)
      for (int64_t r = 0; r < rows; ++r)
        place(layer, index, slot, int(head), rows_[size_t(r)], s.qkv.get() + r * s.width + (begin + head) * dim, t);
    begin += count;
  }
}

// One head of one row, after its matrix.
void Forward::place(const Layer& layer, int index, int slot, int head, const Row& row, float* x, int t) {
  const int64_t dim = c_.head_dim, half = c_.rope_dim / 2;
  if (slot != kValue) {
    if (const float* weight = layer.vector[slot == kQuery ? kQueryNorm : kKeyNorm]) {
      float* normed = space_->scratch.get() + t * space_->own;
      k_.rms_norm(x, weight, dim, c_.eps, normed);
      std::memcpy(x, normed, size_t(dim) * 4);
    }
    if (half) k_.rotate(x, rotations_[size_t(layer.rope)].data() + row.pos * 2 * half, half, c_.rope_interleaved);
  }
  if (slot == kQuery) return k_.scale_and_cap(x, dim, c_.attn_scale, 0.0f);
  uint8_t* keys = model_.caches.keys(row.seq, row.pos / kPage, index, head);
  uint8_t* values = model_.caches.values(row.seq, row.pos / kPage, index, head);
  k_.append_kv(c_.kv_type, slot == kValue, x, int(dim), int(row.pos % kPage), slot == kValue ? values : keys);
}

// The stream += m(in), directly or through a norm.
void Forward::add_to_stream(const hk_matrix& m, const Acts& in, const float* post_norm, int t) {
  Space& s = *space_;
  const int64_t rows = int64_t(rows_.size());
  const Part groups = part(round_up(m.n, kLanes) / kLanes, t, pool_->size());
  product(k_, m, in, rows, groups, s.y.get(), c_.hidden);
  if (!post_norm) {
    const int64_t end = std::min<int64_t>(m.n, groups.last * kLanes);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = groups.first * kLanes; i < end; ++i) s.x[size_t(r * c_.hidden + i)] += s.y[size_t(r * c_.hidden + i)];
    return;
  }
  pool_->barrier();
  const Part p = part(rows, t, pool_->size());
  float* normed = s.scratch.get() + t * s.own;
  for (int64_t r = p.first; r < p.last; ++r) {
    k_.rms_norm(s.y.get() + r * c_.hidden, post_norm, c_.hidden, c_.eps, normed);
    for (int64_t i = 0; i < c_.hidden; ++i) s.x[size_t(r * c_.hidden + i)] += normed[i];
  }
}

// Gate and up of the same 32 columns on one thread, which gates and quantises them as well.
void Forward::feed(const Layer& layer, int t) {
  Space& s = *space_;
  const int64_t rows = int64_t(rows_.size());
  const Part blocks = part(s.inner / kBlock, t, pool_->size());
  const int64_t groups = round_up(c_.intermediate, kLanes) / kLanes, first = blocks.first * kBlock;
  const Part mine{2 * blocks.first, std::min(2 * blocks.last, groups)};
  product(k_, layer.matrix[kGate], s.in_hidden->acts, rows, mine, s.gate.get(), s.inner);
  product(k_, layer.matrix[kUp], s.in_hidden->acts, rows, mine, s.up.get(), s.inner);
  const int64_t count = std::min<int64_t>(c_.intermediate, blocks.last * kBlock) - first;
  if (count <= 0) return;
  for (int64_t r = 0; r < rows; ++r) {
    float* gate = s.gate.get() + r * s.inner;
    k_.gated(c_.act, gate + first, s.up.get() + r * s.inner + first, count, gate + first);
    k_.quantize(gate, c_.intermediate, s.in_inner->acts, r, blocks.first, blocks.last);
  }
}

namespace {
void copy_feature(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = x[i] > 65504.0f ? 65504.0f : x[i] < -65504.0f ? -65504.0f : x[i];
    out[i] = v == v ? v : 0.0f;
  }
}
}  // namespace

void Forward::tap(const Batch& batch, int index, int t) {
  const Part p = part(int64_t(rows_.size()), t, pool_->size());
  for (int c = 0; c < batch.num_taps; ++c)
    for (int64_t r = p.first; batch.taps[c] == index && r < p.last; ++r)
      copy_feature(space_->x.get() + r * c_.hidden, c_.hidden, batch.features + (r * batch.num_taps + c) * c_.hidden);
}

// Final norm, for the last tap and for the rows whose logits are wanted; then the head.
void Forward::finish(const Batch& batch, int t) {
  Space& s = *space_;
  const int64_t threads = pool_->size();
  float* normed = s.scratch.get() + t * s.own;
  const Part rows = part(int64_t(rows_.size()), t, int(threads));
  for (int c = 0; c < batch.num_taps; ++c)
    for (int64_t r = rows.first; batch.taps[c] == c_.num_layers && r < rows.last; ++r) {
      k_.rms_norm(s.x.get() + r * c_.hidden, model_.final_norm, c_.hidden, c_.eps, normed);
      copy_feature(normed, c_.hidden, batch.features + (r * batch.num_taps + c) * c_.hidden);
    }
  const int64_t count = int64_t(wanted_.size());
  if (!count) return;
  norm(model_.final_norm, &wanted_, t);
  pool_->barrier();
  float* logits = batch.logits ? batch.logits : s.logits.get();
  head_part(count, logits, t);
  if (batch.num_top > 0 || batch.log_totals) best(batch, logits, t);
}

// This thread's columns of the logits of quantised rows.
void Forward::head_part(int64_t rows, float* logits, int t) {
  const Part groups = part(round_up(c_.vocab, kLanes) / kLanes, t, pool_->size());
  product(k_, model_.head, space_->in_hidden->acts, rows, groups, logits, c_.vocab);
  if (c_.logit_scale == 1.0f && c_.final_cap == 0.0f) return;
  const int64_t first = groups.first * kLanes, end = std::min<int64_t>(c_.vocab, groups.last * kLanes);
  for (int64_t r = 0; r < rows && first < end; ++r)
    k_.scale_and_cap(logits + r * c_.vocab + first, end - first, c_.logit_scale, c_.final_cap);
}

// Best logits and log-totals of each row: first of pieces of the vocabulary, which threads share out, then merged in
// ascending order, so that no bit depends on the threads.
void Forward::best(const Batch& batch, const float* logits, int t) {
  Space& s = *space_;
  const int64_t rows = int64_t(wanted_.size()), pieces = (c_.vocab + kTopPiece - 1) / kTopPiece;
  const int32_t num = std::max(batch.num_top, 1);  // the first is the maximum of the piece
  pool_->barrier();
  const Part mine = part(rows * pieces, t, pool_->size());
  for (int64_t i = mine.first; i < mine.last; ++i) {
    const int64_t first = i % pieces * kTopPiece, count = std::min<int64_t>(kTopPiece, c_.vocab - first);
    const float* x = logits + i / pieces * c_.vocab + first;
    int32_t* ids = s.top_ids.data() + i * num;
    float* values = s.top_values.data() + i * num;
    std::fill_n(ids, num, -1);
    k_.top(x, count, int32_t(first), num, ids, values);
    if (batch.log_totals) s.totals[size_t(i)] = k_.sum_exp(x, count, values[0]);
  }
  pool_->barrier();
  const Part own = part(rows, t, pool_->size());
  for (int64_t r = own.first; r < own.last; ++r) {
    const int32_t* ids = s.top_ids.data() + r * pieces * num;
    const float* values = s.top_values.data() + r * pieces * num;
    if (batch.log_totals) {
      float most = values[0];
      for (int64_t p = 1; p < pieces; ++p) most = values[p * num] > most ? values[p * num] : most;
      double total = 0;
      for (int64_t p = 0; p < pieces; ++p) total += double(s.totals[size_t(r * pieces + p)]) * std::exp(double(values[p * num]) - most);
      batch.log_totals[r] = float(most + std::log(total));
    }
    int32_t* best_ids = batch.top_ids + r * batch.num_top;
    float* best_values = batch.top_values + r * batch.num_top;
    std::fill_n(best_ids, batch.num_top, -1);
    for (int64_t i = 0; i < pieces * num && batch.num_top > 0; ++i)
      if (ids[i] >= 0) k_.top(values + i, 1, ids[i], batch.num_top, best_ids, best_values);
  }
}

}  // namespace hk
