// How weights lie in memory once packed, the same bytes for every instruction set.
//
// A matrix (N outputs, K inputs) is cut into groups of 16 outputs. Within a group, inputs come in blocks of 32;
// lane l of every 64-byte vector belongs to output l and holds 4 consecutive inputs. A group of a quantised type is
//   headers (K-quants: one per 8 blocks) | scales (one entry per block) | padding to 64 | bit planes of each block
// Bit planes of a block: nibbles as 4 vectors, whose low halves are inputs 4j.. and high halves 16 + 4j.., as in GGUF;
// a fifth bit as one more vector (bit v of a byte belongs to vector v of the eight); a fifth and sixth bit as two;
// or eight vectors of whole bytes, stored with 128 added. Float types store [input][16 outputs].
// Outputs past N and inputs past K are zero.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hk {

enum Type : int32_t {  // numbers of GGUF
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

constexpr int kLayoutVersion = 1;  // of packed weights; raise it when their bytes change
constexpr int kLanes = 16, kBlock = 32, kSuper = 256;

static inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

struct TypeInfo {
  int block;              // inputs per stored GGUF block
  int block_bytes;        // bytes of a GGUF block
  int float_bytes;        // bytes per weight of float types, 0 when quantised
  int plane_bytes;        // packed bit planes of a group's block
  int scale_bytes;        // packed scales of a group's block
  int header_bytes;       // packed header of a group's 8 blocks
};

static inline const TypeInfo* type_info(int type) {
  static const TypeInfo f32{1, 4, 4, 0, 0, 0}, f16{1, 2, 2, 0, 0, 0};
  static const TypeInfo q4_0{32, 18, 0, 256, 32, 0}, q4_1{32, 20, 0, 256, 64, 0}, q5_0{32, 22, 0, 320, 32, 0};
  static const TypeInfo q5_1{32, 24, 0, 320, 64, 0}, q8_0{32, 34, 0, 512, 32, 0}, q4_k{256, 144, 0, 256, 32, 64};
  static const TypeInfo q5_k{256, 176, 0, 320, 32, 64}, q6_k{256, 210, 0, 384, 32, 32};
  switch (type) {
    case kF32: return &f32;
    case kF16:
    case kBF16: return &f16;
    case kQ4_0: return &q4_0;
    case kQ4_1: return &q4_1;
    case kQ5_0: return &q5_0;
    case kQ5_1: return &q5_1;
    case kQ8_0: return &q8_0;
    case kQ4_K: return &q4_k;
    case kQ5_K: return &q5_k;
    case kQ6_K: return &q6_k;
    default: return nullptr;
  }
}

// Bytes before the bit planes of a group with K inputs.
static inline int64_t scales_size(const TypeInfo& t, int64_t k) {
  int64_t blocks = round_up(k, kBlock) / kBlock;
  return round_up(round_up(blocks, 8) / 8 * t.header_bytes + blocks * t.scale_bytes, 64);
}

static inline int64_t group_size(const TypeInfo& t, int64_t k) {
  if (t.float_bytes) return round_up(k, kBlock) * kLanes * t.float_bytes;
  return scales_size(t, k) + round_up(k, kBlock) / kBlock * t.plane_bytes;
}

}  // namespace hk
