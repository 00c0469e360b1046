// A whole commit in one call: its parts are so short that the way back to Python between them would take longer.
#include <algorithm>
#include <vector>

#include "layers.h"

namespace hk {

void draft_take(Workers& w, const Kernels& k, const hk_draft_take& a, const float* features, const int64_t* counts,
                int64_t num_rows, const hk_take_place* places) {
  int64_t tokens = 0, widest = 0;
  for (int64_t b = 0; b < num_rows; ++b) tokens += counts[b];
  std::vector<const hk_matrix*> matrices;
  for (int32_t i = 0; i < a.num_layers; ++i) {
    const hk_take_layer& l = a.layers[i];
    for (const hk_matrix* m : {l.k, l.v, l.memory_k, l.memory_v, l.decay, l.strength})
      if (m) matrices.push_back(m), widest += m->n;
  }
  float* fused = w.floats(2, tokens * (a.fuse->n + widest));
  std::vector<float*> products{fused + tokens * a.fuse->n};
  for (const hk_matrix* m : matrices) products.push_back(products.back() + tokens * m->n);
  dense(w, k, features, tokens, a.tap_norm, a.parts, a.eps, &a.fuse, 1, &fused);
  dense(w, k, fused, tokens, a.norm, 1, a.eps, matrices.data(), int(matrices.size()), products.data());

  auto next = products.begin();
  for (int32_t i = 0; i < a.num_layers; ++i) {
    const hk_take_layer& l = a.layers[i];
    const int64_t row = int64_t(l.num_kv_heads) * l.head_dim, heads = l.memory_heads, width = heads * l.memory_width;
    const float *keys = *next++, *values = *next++, *memory_keys = nullptr, *memory_values = nullptr, *decays = nullptr,
                *strengths = nullptr;
    if (l.memory_k) memory_keys = *next++, memory_values = *next++, decays = *next++;
    if (l.strength) strengths = *next++;
    for (int64_t b = 0, first = 0; b < num_rows; first += counts[b++]) {
      const hk_take_place& to = places[i * num_rows + b];
      const int64_t skipped = std::max<int64_t>(0, counts[b] - to.window), from = first + skipped;
      ring_append(k, keys + from * row, values + from * row, l.k_norm, l.eps, to.turns, counts[b] - skipped,
                  l.num_kv_heads, l.head_dim, to.ring, to.window, (to.place + skipped) % to.window);
      if (to.memory)
        memory_write(w, k, l.core, to.memory, memory_keys + first * width, memory_values + first * width,
                     strengths ? strengths + first * heads : nullptr, decays + first * heads, l.a_log, l.dt_bias,
                     counts[b], l.memory_heads, l.memory_width);
    }
  }
}

}  // namespace hk
