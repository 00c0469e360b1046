// Products of packed matrices by the threads of a pool: the pieces that forwards, layers and chains share.
#pragma once
#include <algorithm>

#include "layers.h"
#include "pack.h"

namespace hk {

inline bool is_float(const hk_matrix& m) { return m.packed && type_info(m.type)->float_bytes != 0; }
inline int64_t groups_of(const hk_matrix& m) { return round_up(m.n, kLanes) / kLanes; }

// Columns of `groups` of a product, bias included; rows of y lie `ldy` apart.
inline void product(const Kernels& k, const hk_matrix& m, const Acts& in, int64_t rows, Part groups, float* y, int64_t ldy) {
  if (groups.first >= groups.last) return;
  k.linear(m.type, static_cast<const uint8_t*>(m.packed), m.n, in, rows, groups.first, groups.last, y, ldy);
  const int64_t end = std::min(m.n, groups.last * kLanes);
  for (int64_t r = 0; m.bias && r < rows; ++r)
    for (int64_t i = groups.first * kLanes; i < end; ++i) y[r * ldy + i] += m.bias[i];
}
inline void product(const Kernels& k, const hk_matrix& m, const Acts& in, int64_t rows, Part groups, float* y) {
  product(k, m, in, rows, groups, y, m.n);
}

struct Norm {
  const float* weight;  // nullptr: none
  int parts;            // normed one by one
  float eps;
};

// This thread's blocks of all rows, normed if there is a norm. `normed` has room for a row.
inline void take_in(const Kernels& k, const float* x, int64_t rows, int64_t size, const Norm& norm, const Acts& in, Part blocks,
             float* normed) {
  for (int64_t r = 0; r < rows && blocks.first < blocks.last; ++r) {
    const float* row = x + r * size;
    const int64_t each = size / norm.parts;
    for (int64_t p = 0; norm.weight && p < norm.parts; ++p)
      k.rms_norm(row + p * each, norm.weight + p * each, each, norm.eps, normed + p * each);
    if (norm.weight) row = normed;
    k.quantize(row, size, in, r, blocks.first, blocks.last);
  }
}

// The embedding of a token.
inline void embed(const hk_draft_chain& c, int64_t dim, int64_t token, float* out) {
  unpack_at(c.embedding_type, dim, c.embedding, token, out);
  for (int64_t i = 0; i < dim; ++i) out[i] *= c.embedding_scale;
}

}  // namespace hk
