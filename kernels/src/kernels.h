// The functions each instruction set provides; one table is chosen at run time (dispatch.cpp).
#pragma once
#include <cstdint>

#include "layout.h"

namespace hk {

// Activations of `stride` rows, quantised per row and block of 32 inputs: value = d * q, |q| <= 127.
struct Acts {
  int64_t stride;  // rows of this call: blocks side by side keep to few cache lines
  int64_t k;       // inputs, padded to a multiple of 32
  int8_t* q;       // [block][row][32]
  float* d;        // [block][row], largest magnitude / 127; NaN when an input is not finite
  float* ds;       // [block][row], d * sum(q)
  int32_t* s8;     // [block][row], -8 * sum(q): the start value for weights stored with 8 added, and so on
  int32_t* s16;
  int32_t* s128;
  int32_t* s32;    // [block][row][2], -32 * sum of each half
  float* x;        // [row][k] as they were, for float weights; or nullptr
};

// Software prefetch of weights: this many bytes ahead, in tiles of at least so many rows. Intel's own prefetchers leave
// a third of the bandwidth unused; AMD's are better alone while a tile has few rows.
constexpr int64_t kFetchAhead = 6144;
extern const int fetch_from_rows;

enum Act : int32_t { kSilu = 0, kGelu = 1 };

constexpr int kPage = 64, kSplit = 256;  // tokens

enum KvType : int32_t { kKvF16 = 0, kKvBF16 = 1, kKvF32 = 2, kKvI8 = 3 };

// Bytes of the keys (or the values) of one page and head.
static inline int64_t page_size(int kv, int64_t dim) {
  return kv == kKvI8 ? (dim + 4) * kPage : dim * kPage * (kv == kKvF32 ? 4 : 2);
}

// Queries of one KV head against one split of up to 256 tokens.
struct Split {
  const uint8_t* const* keys;    // pages of the split
  const uint8_t* const* values;
  const uint8_t* next;           // page that is read after them, or nullptr
  int64_t begin;                 // position of its first token
  int dim, window;               // window 0: all earlier tokens
  float cap;                     // soft-cap of scores, 0: none
  int num;                       // queries
  const float* const* q;         // (num) of (dim), scaled
  const int64_t* pos;            // (num)
  float* const* out;             // (num) of (dim): weighted values
  float *maximum, *total;        // (num)
  float* scratch;                // kMaxQueries * kSplit
};
constexpr int kMaxQueries = 8;

struct Kernels {
  const char* name;
  // Quantise blocks b0..b1 of row `row` from x (k,).
  void (*quantize)(const float* x, int64_t k, const Acts& acts, int64_t row, int64_t b0, int64_t b1);
  // y[r][16 g + lane] for groups g0..g1 of packed weights with n outputs, r in [0, rows).
  void (*linear)(int type, const uint8_t* packed, int64_t n, const Acts& acts, int64_t rows, int64_t g0, int64_t g1,
                 float* y, int64_t ldy);
  void (*gated)(int act, const float* gate, const float* up, int64_t n, float* y);
  void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* y);
  void (*rotate)(float* x, const float* turn, int64_t half, bool interleaved);
  void (*scale_and_cap)(float* x, int64_t n, float scale, float cap);
  // Merge x, whose first value has id `first`, into lists of the `num` best, best first; ids start as -1. Equal values:
  // the lower id first; NaN is better than any number.
  void (*top)(const float* x, int64_t n, int32_t first, int32_t num, int32_t* ids, float* values);
  float (*sum_exp)(const float* x, int64_t n, float maximum);  // of exp(x - maximum)
  void (*append_kv)(int kv, bool is_value, const float* x, int dim, int at, uint8_t* page);
  void (*attend_split)(int kv, const Split& split);
  void (*merge_split)(float* maximum, float* total, float* out, float more_max, float more_total, const float* more,
                      int dim);
  void (*finish_attention)(float* out, float total, int dim);
  // Draft networks (draft.inl).
  void (*memory_write)(float* state, const float* key, const float* value, float weight, float decay, bool delta,
                       int k_dim, int v_dim, float* pull);
  void (*memory_read)(const float* state, const float* query, float scale, int k_dim, int v_dim, float* out);
  void (*dots)(const float* x, int64_t num, const float* rows, const int64_t* ids, int64_t n, int64_t k, float* y,
               int64_t ldy);
  void (*gru_step)(const float* in, const float* own, int64_t n, float* state);
  // Walk `passes` times over data and return the multiply-adds (0: int8 dots, 1: float32 fma) or bytes (2: reads) done.
  int64_t (*exercise)(int what, const uint8_t* data, int64_t bytes, int64_t passes, float* sink);
};

}  // namespace hk
