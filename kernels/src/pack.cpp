#include "pack.h"

#include <cmath>
#include <cstring>

#include "half.h"

namespace hk {
namespace {

// One block of 32 weights, whatever it came from: integers as stored, and the bytes of its scales.
struct Block {
  uint8_t q[kBlock];
  uint16_t d, m;       // fp16: scale; minimum of Q4_1 and Q5_1, or dmin of K-quants with its sign flipped
  uint8_t sub[2];      // K-quants: sub-scale and sub-minimum, or the two int8 sub-scales of Q6_K
};

uint16_t half_at(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

// The 6-bit sub-scale and sub-minimum j of Q4_K and Q5_K.
void sub_scales(const uint8_t* s, int j, uint8_t* out) {
  if (j < 4) {
    out[0] = s[j] & 63, out[1] = s[j + 4] & 63;
  } else {
    out[0] = uint8_t((s[j + 4] & 15) | (s[j - 4] >> 6) << 4), out[1] = uint8_t(s[j + 4] >> 4 | (s[j] >> 6) << 4);
  }
}

Block read_small(int type, const uint8_t* p) {  // Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
  Block b{};
  b.d = half_at(p), p += 2;
  if (type == kQ4_1 || type == kQ5_1) b.m = half_at(p), p += 2;
  if (type == kQ8_0) {
    for (int i = 0; i < 32; ++i) b.q[i] = uint8_t(p[i] + 128);
    return b;
  }
  uint32_t high = 0;
  if (type == kQ5_0 || type == kQ5_1) std::memcpy(&high, p, 4), p += 4;
  for (int i = 0; i < 16; ++i) {
    b.q[i] = uint8_t((p[i] & 15) | (high >> i & 1) << 4);
    b.q[16 + i] = uint8_t(p[i] >> 4 | (high >> (16 + i) & 1) << 4);
  }
  return b;
}

Block read_super(int type, const uint8_t* p, int j) {  // block j of 8 of Q4_K or Q5_K
  Block b{};
  b.d = half_at(p), b.m = half_at(p + 2) ^ 0x8000;
  sub_scales(p + 4, j, b.sub);
  const uint8_t* high = p + 16;
  const uint8_t* q = p + (type == kQ5_K ? 48 : 16) + 32 * (j / 2);
  for (int i = 0; i < 32; ++i) {
    b.q[i] = j % 2 ? q[i] >> 4 : q[i] & 15;
    if (type == kQ5_K) b.q[i] |= uint8_t((high[i] >> j & 1) << 4);
  }
  return b;
}

Block read_q6(const uint8_t* p, int j) {  // block j of 8 of Q6_K
  Block b{};
  const uint8_t *low = p + 64 * (j / 4) + 32 * (j % 2), *high = p + 128 + 32 * (j / 4);
  for (int i = 0; i < 32; ++i) {
    uint8_t nibble = j % 4 < 2 ? low[i] & 15 : low[i] >> 4;
    b.q[i] = uint8_t(nibble | (high[i] >> 2 * (j % 4) & 3) << 4);
  }
  b.sub[0] = p[192 + 2 * j], b.sub[1] = p[193 + 2 * j];
  b.d = half_at(p + 208);
  return b;
}

Block read_block(int type, const uint8_t* row, int64_t b) {
  const TypeInfo& t = *type_info(type);
  if (t.block == kBlock) return read_small(type, row + b * t.block_bytes);
  const uint8_t* super = row + b / 8 * t.block_bytes;
  return type == kQ6_K ? read_q6(super, int(b % 8)) : read_super(type, super, int(b % 8));
}

void write_block(int type, const TypeInfo& t, const Block& b, int64_t blocks, int64_t at, int lane, uint8_t* scales,
                 uint8_t* plane) {
  uint8_t* entry = scales + (blocks + 7) / 8 * t.header_bytes + at * t.scale_bytes;
  uint8_t* header = scales + at / 8 * t.header_bytes;
  auto put16 = [lane](uint8_t* p, uint16_t v) { std::memcpy(p + 2 * lane, &v, 2); };
  if (t.header_bytes) {
    put16(header, b.d);
    if (type != kQ6_K) put16(header + 32, b.m);
    entry[lane] = b.sub[0], entry[16 + lane] = b.sub[1];
  } else {
    put16(entry, b.d);
    if (t.scale_bytes == 64) put16(entry + 32, b.m);
  }
  for (int v = 0; v < 8; ++v)
    for (int i = 0; i < 4; ++i) {
      const uint8_t q = b.q[4 * v + i];
      const int at = 4 * lane + i;
      if (type == kQ8_0) {
        plane[64 * v + at] = q;
        continue;
      }
      plane[64 * (v % 4) + at] |= uint8_t((q & 15) << (v < 4 ? 0 : 4));
      if (t.plane_bytes == 320) plane[256 + at] |= uint8_t((q >> 4 & 1) << v);
      if (t.plane_bytes == 384) plane[256 + 64 * (v / 4) + at] |= uint8_t((q >> 4 & 3) << 2 * (v % 4));
    }
}

float block_value(int type, const Block& b, int i) {
  const float d = half_to_float(b.d), m = half_to_float(b.m);
  switch (type) {
    case kQ4_0: return d * float(b.q[i] - 8);
    case kQ5_0: return d * float(b.q[i] - 16);
    case kQ8_0: return d * float(b.q[i] - 128);
    case kQ6_K: return d * float(int8_t(b.sub[i / 16])) * float(b.q[i] - 32);
    case kQ4_K:
    case kQ5_K: return d * float(b.sub[0]) * float(b.q[i]) + m * float(b.sub[1]);
    default: return d * float(b.q[i]) + m;
  }
}

float inverse(float d) { return std::fabs(d) >= 1.17549435e-38f ? 1 / d : 0; }  // of denormal scales: 0

}  // namespace

void pack(int type, int64_t n, int64_t k, const uint8_t* rows, int64_t g0, int64_t g1, uint8_t* packed) {
  const TypeInfo& t = *type_info(type);
  const int64_t bytes = group_size(t, k), row_bytes = (k + t.block - 1) / t.block * t.block_bytes;
  const int64_t blocks = round_up(k, kBlock) / kBlock;
  for (int64_t g = g0; g < g1; ++g) {
    uint8_t* out = packed + g * bytes;
    std::memset(out, 0, size_t(bytes));
    for (int lane = 0; lane < kLanes && g * kLanes + lane < n; ++lane) {
      const uint8_t* row = rows + (g * kLanes + lane) * row_bytes;
      if (t.float_bytes) {
        for (int64_t i = 0; i < k; ++i)
          std::memcpy(out + (i * kLanes + lane) * t.float_bytes, row + i * t.float_bytes, size_t(t.float_bytes));
        continue;
      }
      for (int64_t b = 0; b < blocks; ++b)
        write_block(type, t, read_block(type, row, b), blocks, b, lane, out, out + scales_size(t, k) + b * t.plane_bytes);
    }
  }
}

void unpack_row(int type, int64_t k, const uint8_t* row, float* out) {
  const TypeInfo& t = *type_info(type);
  for (int64_t i = 0; i < k; ++i) {
    if (type == kF32) {
      std::memcpy(out + i, row + 4 * i, 4);
    } else if (t.float_bytes) {
      const uint16_t v = half_at(row + 2 * i);
      out[i] = type == kF16 ? half_to_float(v) : bf16_to_float(v);
    } else {
      const Block b = read_block(type, row, i / kBlock);
      for (int j = 0; j < kBlock; ++j) out[i + j] = block_value(type, b, j);
      i += kBlock - 1;
    }
  }
}

void quantize_row(int type, int64_t k, const float* row, uint8_t* out) {
  const TypeInfo& t = *type_info(type);
  auto put16 = [](uint8_t* p, uint16_t v) { std::memcpy(p, &v, 2); };
  if (t.float_bytes) {
    for (int64_t i = 0; i < k; ++i) {
      if (type == kF32) std::memcpy(out + 4 * i, row + i, 4);
      if (type == kF16) put16(out + 2 * i, float_to_half(row[i]));
      if (type == kBF16) put16(out + 2 * i, float_to_bf16(row[i]));
    }
    return;
  }
  for (int64_t b = 0; b < k / kBlock; ++b, row += kBlock, out += t.block_bytes) {
    float low = row[0], high = row[0], extreme = row[0];  // extreme: largest magnitude, with its sign
    for (int i = 1; i < kBlock; ++i) {
      low = row[i] < low ? row[i] : low, high = row[i] > high ? row[i] : high;
      extreme = std::fabs(row[i]) > std::fabs(extreme) ? row[i] : extreme;
    }
    bool finite = true;
    for (int i = 0; i < kBlock; ++i) finite = finite && std::fabs(row[i]) <= 3.402823466e38f;
    if (!finite) {  // the whole block becomes NaN, which shows
      std::memset(out, 0, size_t(t.block_bytes));
      put16(out, 0x7e00);
      continue;
    }
    if (type == kQ8_0) {
      const float d = std::fabs(extreme) / 127, id = inverse(d);
      put16(out, float_to_half(d));
      for (int i = 0; i < kBlock; ++i) out[2 + i] = uint8_t(int8_t(std::round(row[i] * id)));
      continue;
    }
    const bool min = type == kQ4_1;
    const float d = min ? (high - low) / 15 : extreme / -8, id = inverse(d);
    put16(out, float_to_half(d));
    if (min) put16(out + 2, float_to_half(low));
    auto q = [&](float x) {
      const int v = min ? int((x - low) * id + 0.5f) : int(x * id + 8.5f);
      return v > 15 ? 15 : v;
    };
    uint8_t* nibble = out + (min ? 4 : 2);
    for (int i = 0; i < 16; ++i) nibble[i] = uint8_t(q(row[i]) | q(row[16 + i]) << 4);
  }
}

}  // namespace hk
