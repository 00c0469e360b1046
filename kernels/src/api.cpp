// The C interface (include/hyflash_kernels.h). Everything behind it is C++; nothing throws across it.
#include "hyflash_kernels.h"

#include <atomic>
#include <chrono>
#include <new>

#include "acts.h"
#include "dispatch.h"
#include "forward.h"
#include "kv_attend.h"
#include "layers.h"
#include "pack.h"
#include "pool.h"

using namespace hk;

struct hk_pool : Workers {
  using Workers::Workers;
};

struct hk_model {
  Model model;
  hk_pool workers;
  Forward forward;
  hk_model(const Config& c, const Kernels& k, int threads) : model(c), workers(threads), forward(model, k, workers) {}
};

namespace {
const Kernels* choose(const char* isa) { return isa && *isa ? kernels_named(isa) : kernels(); }

// 0, or 1 when there was no memory or no thread.
template <class Run>
int32_t status(Run run) {
  try {
    run();
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

template <class Make>
auto or_null(Make make) -> decltype(make()) {
  try {
    return make();
  } catch (const std::exception&) {  // no memory, no threads
    return nullptr;
  }
}
}  // namespace

extern "C" {

int32_t hk_abi() { return HK_ABI; }
const char* hk_isa() { return kernels() ? kernels()->name : ""; }
int32_t hk_isa_runs(const char* name) { return kernels_named(name) != nullptr; }

int64_t hk_packed_size(int32_t type, int64_t n, int64_t k) {
  const TypeInfo* t = type_info(type);
  return t && n > 0 && k > 0 && k % t->block == 0 ? round_up(n, kLanes) / kLanes * group_size(*t, k) : -1;
}
int32_t hk_packed_version() { return kLayoutVersion; }
void hk_pack(int32_t type, int64_t n, int64_t k, const void* rows, void* packed) {
  pack(type, n, k, static_cast<const uint8_t*>(rows), 0, round_up(n, kLanes) / kLanes, static_cast<uint8_t*>(packed));
}
void hk_unpack_rows(int32_t type, int64_t k, const void* rows, const int64_t* ids, int64_t num, float* out) {
  for (int64_t i = 0; i < num; ++i) unpack_at(type, k, rows, ids[i], out + i * k);
}
int32_t hk_quantize_row(int32_t type, int64_t k, const float* row, void* out) {
  switch (type) {
    case kF32:
    case kF16:
    case kBF16:
    case kQ4_0:
    case kQ4_1:
    case kQ8_0: quantize_row(type, k, row, static_cast<uint8_t*>(out)); return 0;
    default: return 1;
  }
}

hk_pool* hk_pool_new(int32_t num_threads) {
  return or_null([&] { return new hk_pool(num_threads); });
}
void hk_pool_free(hk_pool* pool) { delete pool; }

double hk_pool_ping_pong(hk_pool* pool) {
  if (pool->pool->size() < 2) return 0;
  // Best of some batches: a thread that is put aside meanwhile would tell of the scheduler, not of the machine.
  constexpr int kBatch = 16, kBatches = 128;
  constexpr auto kLongest = std::chrono::milliseconds(20);
  alignas(64) std::atomic<int> turn{0};
  double nanoseconds = 0;
  pool->pool->run([&](int t) {
    if (t > 1) return;
    const auto begin = std::chrono::steady_clock::now();
    auto from = begin;
    for (int i = 0; i < kBatch * kBatches; ++i) {
      int now;
      while ((now = turn.load(std::memory_order_acquire)) != 2 * i + t && now >= 0) {
      }
      if (now < 0) return;
      if (t == 0 && i > 0 && i % kBatch == 0) {
        const auto to = std::chrono::steady_clock::now();
        const double mean = std::chrono::duration<double, std::nano>(to - from).count() / kBatch;
        nanoseconds = nanoseconds > 0 && nanoseconds < mean ? nanoseconds : mean;
        from = to;
        if (to - begin > kLongest) return turn.store(-1);
      }
      turn.store(2 * i + t + 1, std::memory_order_release);
    }
  });
  return nanoseconds;
}

int32_t hk_linear(const char* isa, hk_pool* pool, int32_t type, const void* packed, int64_t n, int64_t k, const float* x,
                  int64_t rows, float* y) {
  const Kernels* table = choose(isa);
  if (!table || hk_packed_size(type, n, k) < 0) return 1;
  const hk_matrix matrix{type, n, k, packed, nullptr}, *one = &matrix;
  return status([&] { dense(*pool, *table, x, rows, nullptr, 1, 0.0f, &one, 1, &y); });
}

int32_t hk_dense(hk_pool* pool, const float* x, int64_t rows, const float* norm, int32_t num_parts, float eps,
                 const hk_matrix* const* matrices, int32_t num, float* const* outs) {
  return status([&] { dense(*pool, *kernels(), x, rows, norm, num_parts, eps, matrices, num, outs); });
}
int32_t hk_mlp(hk_pool* pool, const float* x, int64_t rows, const float* norm, float eps, const hk_matrix* gate,
               const hk_matrix* up, const hk_matrix* down, int32_t act, float* out) {
  return status([&] { mlp(*pool, *kernels(), x, rows, norm, eps, *gate, *up, *down, act, out); });
}
int32_t hk_attend_block(hk_pool* pool, const hk_block_attention* a) {
  return status([&] { block_attention(*pool, *kernels(), *a); });
}
void hk_ring_append(const float* keys, const float* values, const float* k_norm, float eps, int64_t tokens,
                    int32_t num_kv_heads, int32_t head_dim, float* ring, int64_t window, int64_t place) {
  ring_append(*kernels(), keys, values, k_norm, eps, nullptr, tokens, num_kv_heads, head_dim, ring, window, place);
}
int32_t hk_memory_write(hk_pool* pool, int32_t core, float* state, const float* keys, const float* values,
                        const float* strengths, const float* decays, const float* a_log, const float* dt_bias,
                        int64_t tokens, int32_t heads, int32_t width) {
  return status([&] {
    memory_write(*pool, *kernels(), core, state, keys, values, strengths, decays, a_log, dt_bias, tokens, heads, width);
  });
}
int32_t hk_memory_read(hk_pool* pool, const float* state, const float* queries, const float* gates, const float* norm,
                       float eps, int64_t slots, int32_t heads, int32_t width, float* out) {
  return status([&] { memory_read(*pool, *kernels(), state, queries, gates, norm, eps, slots, heads, width, out); });
}
int32_t hk_draft_layer_run(hk_pool* pool, const hk_draft_layer* layer, const float* x, int64_t num_rows,
                           int64_t num_slots, int64_t first, const hk_draft_row* rows, float* out) {
  return status([&] { draft_layer(*pool, *kernels(), *layer, x, num_rows, num_slots, first, rows, out); });
}
int64_t hk_draft(hk_pool* pool, const hk_draft_chain* a) {
  int64_t num = -1;
  return status([&] { num = draft_chain(*pool, *kernels(), *a); }) ? -1 : num;
}
int32_t hk_draft_take_run(hk_pool* pool, const hk_draft_take* take, const float* features, const int64_t* counts,
                          int64_t num_rows, const hk_take_place* places) {
  return status([&] { draft_take(*pool, *kernels(), *take, features, counts, num_rows, places); });
}
int32_t hk_draft_block_run(hk_pool* pool, const hk_draft_block* block, hk_block_row* rows, int64_t num_rows,
                           const hk_draft_row* seen) {
  return status([&] { draft_block(*pool, *kernels(), *block, rows, num_rows, seen); });
}

hk_model* hk_model_new(const hk_config* config, const char* isa, int32_t num_threads) {
  const Kernels* table = choose(isa);
  if (!table) return nullptr;
  return or_null([&] { return new hk_model(*config, *table, num_threads); });
}
void hk_model_free(hk_model* m) { delete m; }
hk_pool* hk_model_pool(hk_model* m) { return &m->workers; }
int32_t hk_model_set_threads(hk_model* m, int32_t num_threads) {
  return status([&] { m->forward.set_threads(num_threads); });
}

void hk_model_set_matrix(hk_model* m, int32_t layer, int32_t slot, int32_t type, int64_t n, int64_t k,
                         const void* packed, const float* bias) {
  hk_matrix& to = layer < 0 ? m->model.head : m->model.layers[size_t(layer)].matrix[slot];
  to = {type, n, k, packed, bias};
}
void hk_model_set_vector(hk_model* m, int32_t layer, int32_t slot, const float* data) {
  (layer < 0 ? m->model.final_norm : m->model.layers[size_t(layer)].vector[slot]) = data;
}
void hk_model_set_layer(hk_model* m, int32_t layer, int32_t window, int32_t rope) {
  Layer& l = m->model.layers[size_t(layer)];
  l.window = window, l.rope = rope;
}
void hk_model_add_rope(hk_model* m, const double* frequencies, int32_t count) {
  m->model.frequencies.emplace_back(frequencies, frequencies + count);
}
void hk_model_set_embedding(hk_model* m, int32_t type, const void* rows) {
  m->model.embedding = static_cast<const uint8_t*>(rows), m->model.embedding_type = type;
}

int32_t hk_seq_open(hk_model* m) { return m->model.caches.open(); }
void hk_seq_close(hk_model* m, int32_t seq) { m->model.caches.close(seq); }
void hk_seq_truncate(hk_model* m, int32_t seq, int64_t length) { m->model.caches.set_length(seq, length); }
int64_t hk_kv_bytes(const hk_model* m) { return m->model.caches.nbytes(); }
int64_t hk_kv_reserved_bytes(const hk_model* m) { return m->model.caches.reserved_bytes(); }
int64_t hk_scratch_bytes(const hk_model* m) { return m->forward.scratch_bytes(); }
int32_t hk_forward(hk_model* m, const hk_batch* batch) {
  return m->forward.run(*batch) ? 0 : 1;
}
int32_t hk_head(hk_model* m, const float* hidden, int64_t rows, float* logits) {
  return m->forward.head(hidden, rows, logits) ? 0 : 1;
}
void hk_kv_read(const hk_model* m, int32_t seq, int32_t layer, int32_t which, int64_t first, int64_t count, float* out) {
  const Config& c = m->model.config;
  for (int64_t i = 0; i < count; ++i)
    for (int head = 0; head < c.num_kv_heads; ++head, out += c.head_dim)
      read_kv(c, m->model.caches, seq, layer, head, which != 0, first + i, out);
}
int32_t hk_kv_attend(hk_model* m, const hk_kv_attention* a) {
  return status([&] { kv_attend(m->workers, *kernels(), m->model, *a); });
}

}  // extern "C"
