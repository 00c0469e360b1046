// A whole draft pass in one call: the way back to Python between its parts would take as long as they do.
#include <cstring>
#include <utility>

#include "products.h"

namespace hk {

void draft_block(Workers& w, const Kernels& k, const hk_draft_block& a, hk_block_row* rows, int64_t num_rows,
                 const hk_draft_row* seen) {
  const int64_t dim = a.dim, slots = a.num_slots, count = slots - 1, block = slots * dim;
  const int64_t inputs = a.start[0] ? a.start[0]->k : 0, middle = a.start[1] ? a.start[1]->k : 0;
  float* x = w.floats(3, num_rows * (2 * block + inputs + middle + count * dim));
  float *y = x + num_rows * block, *in = y + num_rows * block, *mid = in + num_rows * inputs, *begin = mid + num_rows * middle;

  for (int64_t b = 0; b < num_rows; ++b) embed(*a.chain, dim, rows[b].anchor, x + b * block);
  if (a.start[0]) {
    for (int64_t b = 0; b < num_rows; ++b) {
      std::memcpy(in + b * inputs, rows[b].before, size_t(inputs - dim) * 4);
      std::memcpy(in + (b + 1) * inputs - dim, x + b * block, size_t(dim) * 4);
    }
    float* first = a.start[1] ? mid : begin;
    dense(w, k, in, num_rows, a.start_norm, a.start_parts, a.start_eps, &a.start[0], 1, &first);
    if (a.start[1]) dense(w, k, mid, num_rows, nullptr, 1, 0.0f, &a.start[1], 1, &begin);
  }
  for (int64_t b = 0; b < num_rows; ++b)
    for (int64_t s = 0; s < count; ++s)
      std::memcpy(x + b * block + (s + 1) * dim, a.start[0] ? begin + (b * count + s) * dim : a.mask, size_t(dim) * 4);

  for (int32_t i = 0; i < a.num_layers; ++i) {
    const int64_t drop = i + 1 == a.num_layers;  // the anchor's slot ends with the last layer
    draft_layer(w, k, *a.layers[i], x, num_rows, slots, drop, seen + i * num_rows, y);
    std::swap(x, y);
  }
  for (int64_t r = 0; a.norm && r < num_rows * count; ++r) {
    k.rms_norm(x + r * dim, a.norm, dim, a.norm_eps, y);
    std::memcpy(x + r * dim, y, size_t(dim) * 4);
  }
  for (int64_t b = 0; b < num_rows; ++b) {
    hk_block_row& row = rows[b];
    hk_draft_chain chain = *a.chain;
    chain.hidden = x + b * count * dim, chain.num = row.num, chain.anchor = row.anchor;
    chain.rows = row.rows, chain.more = row.more, chain.more_bias = row.more_bias, chain.more_ids = row.more_ids;
    chain.num_more = row.num_more, chain.tokens = row.tokens, chain.shares = row.shares;
    row.found = draft_chain(w, k, chain);
  }
}

}  // namespace hk
