/* C interface of hyflash-kernels: quantised linear layers and decoder forwards on CPUs, with no Python in it.
 *
 * Promise: the bits of a row depend only on that row's tokens and its sequence's earlier tokens: not on how many rows
 * share the call, on threads, or on the instruction set.
 *
 * Sizes are checked by the caller. Pointers given to hk_model_set_* must live as long as the model. Functions that
 * can fail return 0 for success. A model must not be used from two threads at once.
 */
#ifndef HYFLASH_KERNELS_H
#define HYFLASH_KERNELS_H

#include <stdint.h>

#ifdef _WIN32
#define HK_API __declspec(dllexport)
#else
#define HK_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised with every change of this file. */
#define HK_ABI 4
HK_API int32_t hk_abi(void);

/* Name of the instruction set in use: amx, avx512, avxvnni, avx2, neon or portable; HYFLASH_KERNELS_ISA overrides.
 * Empty when that variable names one that is unknown or does not run here. hk_isa_runs: 1 when `name` does. */
HK_API const char* hk_isa(void);
HK_API int32_t hk_isa_runs(const char* name);

/* ---- weights. Types have GGUF's numbers: F32 0, F16 1, Q4_0 2, Q4_1 3, Q5_0 6, Q5_1 7, Q8_0 8, Q4_K 12, Q5_K 13,
 * Q6_K 14, BF16 30. Rows are (n, k) in GGUF order. */

/* Bytes of the packed form (64-byte aligned by the caller), or -1 for an unknown type or a k that is no multiple of
 * the type's block. */
HK_API int64_t hk_packed_size(int32_t type, int64_t n, int64_t k);
/* Version of the packed layout; a cached file of another version must be packed again. */
HK_API int32_t hk_packed_version(void);
HK_API void hk_pack(int32_t type, int64_t n, int64_t k, const void* rows, void* packed);
/* Rows `ids` (num) of GGUF rows of k weights -> float32 (num, k). */
HK_API void hk_unpack_rows(int32_t type, int64_t k, const void* rows, const int64_t* ids, int64_t num, float* out);
/* One float32 row -> GGUF; Q8_0, Q4_0, Q4_1, F16, BF16, F32. */
HK_API int32_t hk_quantize_row(int32_t type, int64_t k, const float* row, void* out);

/* ---- thread pool and single layers (drafters, tests) */

typedef struct hk_pool hk_pool;
HK_API hk_pool* hk_pool_new(int32_t num_threads);
HK_API void hk_pool_free(hk_pool*);
/* Nanoseconds of a cache-line round trip between thread 0 and thread 1; 0 with one thread. */
HK_API double hk_pool_ping_pong(hk_pool*);

/* What the machine can do at best, per second with all threads: multiply-adds of int8 dot products (what 0) or float32
 * fma (1), each thread on all of `data`, which should fit in a first-level cache; or bytes read (2), shared out. `data`
 * has at least 4096 bytes. 0 when it cannot be measured. */
HK_API double hk_bench(const char* isa, int32_t num_threads, int32_t what, const void* data, int64_t bytes);

/* y (rows, n) = x (rows, k) times packed^T. `isa` NULL: the one in use. */
HK_API int32_t hk_linear(const char* isa, hk_pool*, int32_t type, const void* packed, int64_t n, int64_t k,
                         const float* x, int64_t rows, float* y);

/* ---- layers of draft networks. Rows are float32 and contiguous; weights are packed. 0: done, 1: no memory. */

typedef struct {
  int32_t type;
  int64_t n, k;
  const void* packed;
  const float* bias; /* (n) or NULL */
} hk_matrix;

/* outs[i] (rows, n_i) = norm(x) W_i^T + bias_i for matrices that share their input x (rows, k). `norm` (k) are the
 * weights of a root-mean-square norm over each of `num_parts` equal parts of a row, or NULL: x as it is. */
HK_API int32_t hk_dense(hk_pool*, const float* x, int64_t rows, const float* norm, int32_t num_parts, float eps,
                        const hk_matrix* const* matrices, int32_t num, float* const* outs);
/* out (rows, down.n) = x + down(act(gate(y)) * up(y)) with y = norm(x); act 0 SiLU, 1 GELU (tanh). */
HK_API int32_t hk_mlp(hk_pool*, const float* x, int64_t rows, const float* norm, float eps, const hk_matrix* gate,
                      const hk_matrix* up, const hk_matrix* down, int32_t act, float* out);

/* Attention of the last `num_queries` of `num_slots` slots of a draft block to the tokens of a ring and to the block.
 * Ring token p (0 is the oldest) lies in place (first + p) % window. Tables of turns: cosines, then sines. */
typedef struct {
  int32_t num_heads, num_kv_heads, head_dim; /* head_dim: a multiple of 16 */
  int32_t num_slots, num_queries, causal;    /* causal: no slot sees a later one */
  const float *q, *k, *v;                    /* (queries, H, K), (slots, G, K), (slots, G, K) as projected */
  const float *q_norm, *k_norm;              /* (K), weights of their norms */
  const float* ring;                         /* (window, 2, G, K): normed keys, values */
  int64_t window, first, held;
  const float* key_turns;                    /* (held, K), or NULL when the ring's keys are turned already */
  const float* slot_turns;                   /* (slots, K) */
  float eps, scale;
  float* out;                                /* (queries, H, K) */
} hk_block_attention;
HK_API int32_t hk_attend_block(hk_pool*, const hk_block_attention*);

/* Write `tokens` keys (tokens, G, K), normed by k_norm, and values to the ring's places from `place` on; tokens <=
 * window. */
HK_API void hk_ring_append(const float* keys, const float* values, const float* k_norm, float eps, int64_t tokens,
                           int32_t num_kv_heads, int32_t head_dim, float* ring, int64_t window, int64_t place);

/* Recurrent memory of one row (ops/memory.py has the recurrence): `core` 0 mean, 1 gla, 2 delta, 3 mamba2; a_log and
 * dt_bias (heads). state (heads, width, width) takes `tokens` writes from projections: keys and values (tokens, heads,
 * width), strengths (tokens, heads; NULL for mean and mamba2), decays (tokens, heads). width: a multiple of 16. */
HK_API int32_t hk_memory_write(hk_pool*, int32_t core, float* state, const float* keys, const float* values,
                               const float* strengths, const float* decays, const float* a_log, const float* dt_bias,
                               int64_t tokens, int32_t heads, int32_t width);
/* out (slots, heads * width) = norm(state^T q / sqrt(width)) * SiLU(gates), q the queries (slots, heads, width) at unit
 * length; `norm` (width). */
HK_API int32_t hk_memory_read(hk_pool*, const float* state, const float* queries, const float* gates, const float* norm,
                              float eps, int64_t slots, int32_t heads, int32_t width, float* out);

/* A whole layer of a draft network (layers.DraftLayer): attention, what slots read of the memory, gated MLP. */
typedef struct {
  int32_t num_heads, num_kv_heads, head_dim, causal;
  int32_t memory_heads, memory_width;              /* 0: no memory */
  const float *norm, *q_norm, *k_norm, *memory_norm, *mlp_norm;
  float eps, head_eps, memory_eps, mlp_eps;
  const hk_matrix *q, *k, *v, *o, *gate, *up, *down;
  const hk_matrix *memory_q, *memory_gate, *memory_out;
} hk_draft_layer;
/* What the layer sees of one row: its ring as in hk_block_attention, and its memory (heads, width, width) or NULL. */
typedef struct {
  const float* ring;
  int64_t window, first, held;
  const float *key_turns, *slot_turns, *memory;
} hk_draft_row;
/* Slots x (rows, slots, dim) -> out (rows, slots - first, dim), for the slots from `first` on. */
HK_API int32_t hk_draft_layer_run(hk_pool*, const hk_draft_layer*, const float* x, int64_t num_rows, int64_t num_slots,
                                  int64_t first, const hk_draft_row* rows, float* out);

/* Draft tokens along the hidden states of a block, through a head of some rows: those of `head`, whose ids are head_ids,
 * and `more` of `rows`; among equal logits the first wins, NaN wins over all. With gru_in each state is corrected first, by the
 * token chosen before it (layers.GRUCorrection): state (n) <- GRU(rms(embedding), state), then hidden + up(SiLU(down(
 * [rms(hidden), state]))). gru_in is (3 n, dim), gru_own (3 n, n). Without (NULL) no embedding is read. */
typedef struct {
  const float* hidden; /* (num, dim) */
  int64_t num, anchor; /* anchor: the token before hidden[0]'s */
  const hk_matrix *gru_in, *gru_own, *down, *up;
  float eps;
  const hk_matrix* head;    /* (n, dim) */
  const int64_t* head_ids;  /* (n) */
  const float* rows;        /* (.., dim), of which `more` (num_more) are indices */
  const int64_t* more;
  const float* more_bias;   /* (num_more) or NULL */
  const int64_t* more_ids;  /* (num_more) */
  int64_t num_more;
  int32_t embedding_type;   /* GGUF rows of all tokens, and a factor on them */
  const void* embedding;
  float embedding_scale;
  int64_t* tokens; /* (num) */
  float* shares;   /* (num) share of the chosen one in the sum of exp */
} hk_draft_chain;
/* Number of tokens: fewer than num when logits are not finite; -1: no memory. */
HK_API int64_t hk_draft(hk_pool*, const hk_draft_chain*);

/* A whole draft pass: slot inputs, layers, last norm, draft tokens. */
typedef struct {
  int64_t dim, num_slots;        /* slots of a block, the anchor's included */
  const hk_matrix* start[2];     /* slot inputs ((num_slots - 1) * dim) from features and the anchor's embedding, */
  int32_t start_parts;           /* (parts, dim) normed one by one; without (NULL) every slot begins as `mask` (dim) */
  float start_eps;
  const float* start_norm;       /* (parts * dim) */
  const float* mask;
  const hk_draft_layer* const* layers;
  int32_t num_layers;
  const float* norm;             /* (dim), of the last states, or NULL */
  float norm_eps;
  const hk_draft_chain* chain;   /* what is the same in each pass; the embedding is always read */
} hk_draft_block;
typedef struct {
  const float* before;           /* (parts - 1, dim) features before the anchor */
  int64_t anchor, num;           /* num: tokens wanted, 1 to num_slots - 1 */
  const float* rows;             /* rows to found: as in hk_draft_chain, whose answer `found` is */
  const int64_t* more;
  const float* more_bias;
  const int64_t* more_ids;
  int64_t num_more;
  int64_t* tokens;
  float* shares;
  int64_t found;
} hk_block_row;
/* `seen` (layers, rows): what each layer sees of each row. */
HK_API int32_t hk_draft_block_run(hk_pool*, const hk_draft_block*, hk_block_row* rows, int64_t num_rows,
                                  const hk_draft_row* seen);

/* A whole commit: features of new tokens, fused, into the rings and memories of all layers. */
typedef struct {
  const hk_matrix *k, *v, *memory_k, *memory_v, *decay, *strength; /* memory_k NULL: no memory; strength as below */
  const float *k_norm, *a_log, *dt_bias;
  float eps;                     /* of k_norm */
  int32_t num_kv_heads, head_dim, core, memory_heads, memory_width;
} hk_take_layer;
typedef struct {
  const hk_matrix* fuse;         /* (dim) from (parts, dim) features */
  const float *tap_norm, *norm;  /* (parts * dim) normed one by one, or NULL; (dim) */
  int32_t parts;
  float eps;
  const hk_take_layer* layers;
  int32_t num_layers;
} hk_draft_take;
/* What of one row a layer writes: its ring from `place` on as in hk_ring_append, though of more tokens than it has places
 * only the last; and its memory, or NULL. With `turns` (tokens, K) keys are turned first. */
typedef struct {
  float* ring;
  int64_t window, place;
  const float* turns;
  float* memory;
} hk_take_place;
/* features (all tokens, parts, dim), row after row, of which row b has counts[b]; `places` (layers, rows). */
HK_API int32_t hk_draft_take_run(hk_pool*, const hk_draft_take*, const float* features, const int64_t* counts,
                                 int64_t num_rows, const hk_take_place* places);

/* ---- models */

typedef struct {
  int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab;
  int32_t act;              /* 0 SiLU, 1 GELU (tanh) */
  int32_t rope_dim;         /* rotated dimensions of a head, the first ones */
  int32_t rope_interleaved; /* 1: pairs (2i, 2i+1); 0: (i, i + rope_dim / 2) */
  int32_t kv_type;          /* 0 float16, 1 bfloat16, 2 float32, 3 int8 with a scale per token and head */
  float eps, attn_scale, attn_cap, final_cap, embed_scale, logit_scale, rope_scale; /* caps: 0 is none */
} hk_config;

typedef struct {
  const int64_t* tokens;  /* (rows), sequence after sequence */
  const int32_t* seqs;    /* (num_seqs) */
  const int32_t* lengths; /* (num_seqs), new rows of each */
  int32_t num_seqs;
  const int32_t* taps;    /* (num_taps) decoder layers whose outputs are wanted; num_layers: after the final norm */
  int32_t num_taps;
  float* features;        /* (rows, num_taps, hidden), clamped to +-65504, NaN as 0 */
  int32_t logits_mode;    /* whose logits: 0 no row's, 1 those of the last row of each sequence, 2 all rows' */
  float* logits;          /* (num_seqs or rows, vocab); may be NULL */
  int32_t num_top;        /* best logits wanted of each of these rows, at most vocab; 0: none */
  int32_t* top_ids;       /* (num_seqs or rows, num_top), best first, among equals the lower id; NaN is the best */
  float* top_values;      /* as top_ids */
  float* log_totals;      /* (num_seqs or rows) log of the sum of exp(logits); may be NULL */
} hk_batch;

typedef struct hk_model hk_model;
HK_API hk_model* hk_model_new(const hk_config*, const char* isa, int32_t num_threads);
HK_API void hk_model_free(hk_model*);
HK_API int32_t hk_model_set_threads(hk_model*, int32_t num_threads);
/* The model's own pool, for draft layers that run between its forwards; not to be freed. */
HK_API hk_pool* hk_model_pool(hk_model*);
/* Matrices of a layer: 0 query, 1 key, 2 value, 3 output, 4 gate, 5 up, 6 down; layer -1: the head. Bias may be NULL. */
HK_API void hk_model_set_matrix(hk_model*, int32_t layer, int32_t slot, int32_t type, int64_t n, int64_t k,
                                const void* packed, const float* bias);
/* Vectors of a layer: 0 norm before attention, 1 before the MLP, 2 after attention, 3 after the MLP, 4 of queries,
 * 5 of keys; layer -1: the final norm. */
HK_API void hk_model_set_vector(hk_model*, int32_t layer, int32_t slot, const float* data);
/* window 0: all earlier tokens; rope: index of hk_model_add_rope's frequencies. */
HK_API void hk_model_set_layer(hk_model*, int32_t layer, int32_t window, int32_t rope);
HK_API void hk_model_add_rope(hk_model*, const double* frequencies, int32_t count);
/* Embedding rows (vocab, hidden) in GGUF order. */
HK_API void hk_model_set_embedding(hk_model*, int32_t type, const void* rows);

HK_API int32_t hk_seq_open(hk_model*);
HK_API void hk_seq_close(hk_model*, int32_t seq);
HK_API void hk_seq_truncate(hk_model*, int32_t seq, int64_t length);
HK_API int64_t hk_kv_bytes(const hk_model*);
/* Bytes of memory kept for keys and values, free pages included, and of what forwards keep beside them. */
HK_API int64_t hk_kv_reserved_bytes(const hk_model*);
HK_API int64_t hk_scratch_bytes(const hk_model*);
/* Append the rows. 0, or 1 when there is no memory; nothing has changed then. */
HK_API int32_t hk_forward(hk_model*, const hk_batch*);
/* Logits (rows, vocab) of final-normed states (rows, hidden), scale and cap included. 1: no memory. */
HK_API int32_t hk_head(hk_model*, const float* hidden, int64_t rows, float* logits);
/* Keys (which 0) or values (1) of `count` tokens from `first` on as float32 (count, num_kv_heads, head_dim). */
HK_API void hk_kv_read(const hk_model*, int32_t seq, int32_t layer, int32_t which, int64_t first, int64_t count,
                       float* out);
/* Attention of queries of one's own to tokens first..last - 1 (at least one) of a layer, where they lie. 1: no memory. */
typedef struct {
  int32_t seq, layer, num_queries, num_heads; /* heads of the queries, a multiple of num_kv_heads */
  int64_t first, last;
  const float* q; /* (num_queries, num_heads, head_dim), scaled, and rotated as the keys are */
  float* out;     /* the same shape */
  float* lse;     /* (num_queries, num_heads): log of the sum of exp(score) */
} hk_kv_attention;
HK_API int32_t hk_kv_attend(hk_model*, const hk_kv_attention*);

#ifdef __cplusplus
}
#endif
#endif
