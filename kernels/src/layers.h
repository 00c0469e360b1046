// Layers of draft networks on the threads of a pool: float32 rows in, float32 rows out.
#pragma once
#include <memory>
#include <vector>

#include "acts.h"
#include "hyflash_kernels.h"
#include "pool.h"

namespace hk {

// A pool with the memory its calls need, kept for the next ones.
struct Workers {
  explicit Workers(int num_threads) : pool(std::make_unique<Pool>(num_threads)) {}

  std::unique_ptr<Pool> pool;

  // Activations for `rows` of `k` inputs; `which` keeps some of them apart. Throws std::bad_alloc.
  const Acts& acts(int which, int64_t rows, int64_t k, bool with_float);
  // Floats for this call; `which` is 0 or 1, 2 for a layer made of other calls, 3 for a block. Throws std::bad_alloc.
  float* floats(int which, int64_t count);

 private:
  struct Kept {
    int which;
    int64_t rows, k;
    bool with_float;
    std::unique_ptr<ActsBuffer> buffer;
  };
  std::vector<Kept> kept_;
  Buffer<float> floats_[4];
  int64_t num_floats_[4] = {};
};

// See the C interface for what they compute; all throw std::bad_alloc.
void dense(Workers& w, const Kernels& k, const float* x, int64_t rows, const float* norm, int parts, float eps,
           const hk_matrix* const* matrices, int num, float* const* outs);
void mlp(Workers& w, const Kernels& k, const float* x, int64_t rows, const float* norm, float eps, const hk_matrix& gate,
         const hk_matrix& up, const hk_matrix& down, int act, float* out);
void block_attention(Workers& w, const Kernels& k, const hk_block_attention& a);
void ring_append(const Kernels& k, const float* keys, const float* values, const float* k_norm, float eps,
                 const float* turns, int64_t tokens, int num_kv_heads, int dim, float* ring, int64_t window, int64_t place);
void memory_write(Workers& w, const Kernels& k, int core, float* state, const float* keys, const float* values,
                  const float* strengths, const float* decays, const float* a_log, const float* dt_bias, int64_t tokens,
                  int heads, int width);
void memory_read(Workers& w, const Kernels& k, const float* state, const float* queries, const float* gates,
                 const float* norm, float eps, int64_t slots, int heads, int width, float* out);
void draft_layer(Workers& w, const Kernels& k, const hk_draft_layer& l, const float* x, int64_t num_rows, int64_t num_slots,
                 int64_t first, const hk_draft_row* rows, float* out);
int64_t draft_chain(Workers& w, const Kernels& k, const hk_draft_chain& a);
void draft_take(Workers& w, const Kernels& k, const hk_draft_take& a, const float* features, const int64_t* counts,
                int64_t num_rows, const hk_take_place* places);
void draft_block(Workers& w, const Kernels& k, const hk_draft_block& a, hk_block_row* rows, int64_t num_rows,
                 const hk_draft_row* seen);

}  // namespace hk
