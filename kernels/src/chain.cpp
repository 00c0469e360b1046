// Draft tokens along a block, with a GRU's correction from token to token or without.
// A step is a few products, each short: what is small is made by every thread for itself, which spares barriers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "layers.h"
#include "products.h"

namespace hk {
namespace {

// Columns that are searched at once, of the head and of what is more: the same whatever the threads, as their sums are.
constexpr int64_t kPiece = 256, kMorePiece = 32;

class Chain {
 public:
  Chain(Workers& w, const Kernels& k, const hk_draft_chain& a)
      : pool_(*w.pool),
        k_(k),
        a_(a),
        dim_(a.head->k),
        n_(a.head->n),
        rows_(a.gru_in ? 1 : a.num),
        width_(a.gru_in ? a.gru_own->k : 0),
        rank_(a.gru_in ? a.down->n : 0),
        num_pieces_((n_ + kPiece - 1) / kPiece),
        all_pieces_(num_pieces_ + (a.num_more + kMorePiece - 1) / kMorePiece),
        own_floats_(round_up(2 * dim_ + 2 * width_ + std::max(rank_, dim_), 16)),
        pieces_(size_t(rows_ * all_pieces_)) {
    const int64_t most = std::max(dim_, rank_);
    logits_ = w.floats(1, rows_ * (n_ + a.num_more) + 6 * width_ + rank_ + dim_ + most + own_floats_ * pool_.size());
    extra_ = logits_ + rows_ * n_, from_in_ = extra_ + rows_ * a.num_more, from_own_ = from_in_ + 3 * width_;
    mixed_ = from_own_ + 3 * width_, fixed_ = mixed_ + rank_, ones_ = fixed_ + dim_, own_ = ones_ + most;
    std::fill_n(ones_, most, 1.0f);
    for (int t = 0; t < (a.gru_in ? pool_.size() : 1); ++t) {
      in_.push_back(&w.acts(5 * t + 4, rows_, dim_, is_float(*a.head)));
      if (!a.gru_in) break;
      token_.push_back(&w.acts(5 * t, 1, dim_, is_float(*a.gru_in)));
      state_.push_back(&w.acts(5 * t + 1, 1, width_, is_float(*a.gru_own)));
      both_.push_back(&w.acts(5 * t + 2, 1, dim_ + width_, is_float(*a.down)));
      mid_.push_back(&w.acts(5 * t + 3, 1, rank_, is_float(*a.up)));
    }
  }

  void thread(int t) {
    if (!a_.gru_in) {
      take_in(k_, a_.hidden, rows_, dim_, kNoNorm, *in_[0], part(in_[0]->k / kBlock, t, pool_.size()), nullptr);
      pool_.barrier();
      search(a_.hidden, *in_[0], t);
      pool_.barrier();
      const Part mine = part(rows_, t, pool_.size());
      for (int64_t r = mine.first; r < mine.last; ++r) a_.tokens[r] = choose(r, &a_.shares[r]);
      return;
    }
    int64_t token = a_.anchor;
    std::fill_n(own_ + own_floats_ * t, width_, 0.0f);
    for (int64_t i = 0; i < a_.num; ++i) {
      correct(token, a_.hidden + i * dim_, t);
      quantize_row(fixed_, *in_[size_t(t)]);
      search(fixed_, *in_[size_t(t)], t);
      pool_.barrier();
      float share;
      token = choose(0, &share);
      if (t == 0) a_.tokens[i] = token, a_.shares[i] = share;
      if (!std::isfinite(share)) return;
    }
  }

 private:
  struct Piece {
    int32_t id;
    float best, total;  // the sum of exp(logit - best)
  };
  static constexpr Norm kNoNorm{nullptr, 1, 0.0f};

  void quantize_row(const float* x, const Acts& to) { k_.quantize(x, to.k, to, 0, 0, to.k / kBlock); }

  // fixed_ = hidden + up(SiLU(down([rms(hidden), state]))), after the state has taken in the token.
  void correct(int64_t token, const float* hidden, int t) {
    const int of = pool_.size();
    float *state = own_ + own_floats_ * t, *row = state + width_, *next = row + dim_, *more = next + width_;
    const Acts &in = *token_[size_t(t)], &own = *state_[size_t(t)], &both = *both_[size_t(t)], &mid = *mid_[size_t(t)];
    embed(a_, dim_, token, more);
    k_.rms_norm(more, ones_, dim_, a_.eps, row);
    k_.quantize(row, dim_, in, 0, 0, in.k / kBlock);
    k_.quantize(state, width_, own, 0, 0, own.k / kBlock);
    product(k_, *a_.gru_in, in, 1, part(groups_of(*a_.gru_in), t, of), from_in_);
    product(k_, *a_.gru_own, own, 1, part(groups_of(*a_.gru_own), t, of), from_own_);
    pool_.barrier();
    k_.gru_step(from_in_, from_own_, width_, state);
    k_.rms_norm(hidden, ones_, dim_, a_.eps, row);
    std::memcpy(next, state, size_t(width_) * 4);
    k_.quantize(row, dim_ + width_, both, 0, 0, both.k / kBlock);
    product(k_, *a_.down, both, 1, part(groups_of(*a_.down), t, of), mixed_);
    pool_.barrier();
    k_.gated(kSilu, mixed_, ones_, rank_, more);
    k_.quantize(more, rank_, mid, 0, 0, mid.k / kBlock);
    const Part groups = part(groups_of(*a_.up), t, of);
    product(k_, *a_.up, mid, 1, groups, fixed_);
    for (int64_t i = groups.first * kLanes; i < std::min(dim_, groups.last * kLanes); ++i) fixed_[i] += hidden[i];
    pool_.barrier();
  }

  // This thread's pieces of the logits of x, and the best of each.
  void search(const float* x, const Acts& in, int t) {
    const Part mine = part(num_pieces_, t, pool_.size()), more = part(all_pieces_ - num_pieces_, t, pool_.size());
    const int64_t stop = std::min(mine.last * kPiece, n_), end = std::min(more.last * kMorePiece, a_.num_more);
    product(k_, *a_.head, in, rows_, {mine.first * kPiece / kLanes, round_up(stop, kLanes) / kLanes}, logits_);
    const int64_t first = more.first * kMorePiece;
    k_.dots(x, rows_, a_.rows, a_.more + first, std::max<int64_t>(0, end - first), dim_, extra_ + first, a_.num_more);
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t j = first; a_.more_bias && j < end; ++j) extra_[r * a_.num_more + j] += a_.more_bias[j];
      Piece* found = pieces_.data() + r * all_pieces_;
      for (int64_t p = mine.first; p < mine.last; ++p)
        found[p] = best_of(logits_ + r * n_, p * kPiece, std::min((p + 1) * kPiece, n_), 0);
      for (int64_t p = more.first; p < more.last; ++p)
        found[num_pieces_ + p] = best_of(extra_ + r * a_.num_more, p * kMorePiece, std::min((p + 1) * kMorePiece, a_.num_more), n_);
    }
  }

  Piece best_of(const float* logits, int64_t first, int64_t last, int64_t ids_from) {
    Piece found{-1, 0.0f, 0.0f};
    k_.top(logits + first, last - first, int32_t(ids_from + first), 1, &found.id, &found.best);
    if (found.best != -INFINITY) found.total = k_.sum_exp(logits + first, last - first, found.best);
    return found;
  }

  // Token of a row and its share in the sum of exp; the share is not finite where the best logit is not.
  int64_t choose(int64_t row, float* share) {
    const Piece* found = pieces_.data() + row * all_pieces_;
    int32_t id = -1;
    float best = 0.0f;
    for (int64_t p = 0; p < all_pieces_; ++p) k_.top(&found[p].best, 1, found[p].id, 1, &id, &best);
    double total = 0.0;
    for (int64_t p = 0; p < all_pieces_; ++p) total += double(found[p].total) * std::exp(double(found[p].best) - best);
    *share = float(1.0 / total);
    return id < n_ ? a_.head_ids[id] : a_.more_ids[id - n_];
  }

  Pool& pool_;
  const Kernels& k_;
  const hk_draft_chain& a_;
  const int64_t dim_, n_, rows_, width_, rank_, num_pieces_, all_pieces_, own_floats_;
  float *logits_, *extra_, *from_in_, *from_own_, *mixed_, *fixed_, *ones_, *own_;
  std::vector<Piece> pieces_;
  std::vector<const Acts*> in_, token_, state_, both_, mid_;  // of each thread
};

}  // namespace

int64_t draft_chain(Workers& w, const Kernels& k, const hk_draft_chain& a) {
  if (a.num == 0) return 0;
  Chain chain(w, k, a);
  w.pool->run([&](int t) { chain.thread(t); });
  return std::find_if(a.shares, a.shares + a.num, [](float share) { return !std::isfinite(share); }) - a.shares;
}

}  // namespace hk
