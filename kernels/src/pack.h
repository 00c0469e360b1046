// GGUF rows -> packed groups of 16 outputs (layout.h). Slow and obvious: it runs once a file.
#pragma once
#include <cstdint>

#include "layout.h"

namespace hk {

// Pack groups g0..g1 of a (n, k) matrix in GGUF row order; lanes without an output and inputs past k become zero.
void pack(int type, int64_t n, int64_t k, const uint8_t* rows, int64_t g0, int64_t g1, uint8_t* packed);

// Weights of one row as float32; the oracle of the kernels and the embedding lookup. k is a multiple of the block.
void unpack_row(int type, int64_t k, const uint8_t* row, float* out);

// float32 row -> GGUF blocks of Q8_0, Q4_0, Q4_1, F16, BF16 or F32 (k a multiple of the block), as ggml rounds them.
// A block with a weight that is not finite becomes NaN.
void quantize_row(int type, int64_t k, const float* row, uint8_t* out);

// Row `index` of rows of k weights -> float32 (k).
inline void unpack_at(int32_t type, int64_t k, const void* rows, int64_t index, float* out) {
  const TypeInfo& t = *type_info(type);
  unpack_row(type, k, static_cast<const uint8_t*>(rows) + index * (k / t.block * t.block_bytes), out);
}

}  // namespace hk
