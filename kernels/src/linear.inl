// Linear layers: 16 outputs by up to kMaxRows rows, each weight decoded once for all rows of the tile.
// A row's sums are added block after block in one chain, whatever the tile, so its bits do not depend on the rows
// beside it, nor on threads, nor on the instruction set (integer dot products are exact, the rest is IEEE fma).

namespace hk::HK_ISA {

// fn(0), fn(1) .. fn(N - 1), each compiled on its own, so that arrays indexed by it live in registers.
template <class Fn, int... I>
inline __attribute__((always_inline)) void each_of([[maybe_unused]] Fn fn, std::integer_sequence<int, I...>) {
  (fn(std::integral_constant<int, I>()), ...);
}
template <int N, class Fn>
inline __attribute__((always_inline)) void each(Fn fn) {
  each_of(fn, std::make_integer_sequence<int, N>());
}
#define HK_INLINE __attribute__((always_inline))

template <int TYPE>
struct Format;  // bits, start(acts), planes(p, w), and scale(...)

inline void nibbles(const uint8_t* p, B* w) {
  for (int j = 0; j < 4; ++j) {
    B x = load_b(p + 64 * j);
    w[j] = low4(x), w[4 + j] = high4(x);
  }
}

// One bit of each weight lies in bit v of a byte of x; it becomes bit 4 of vector v.
inline void fifth_bits(const uint8_t* p, B* w) {
  B x = load_b(p);
  w[0] = or_b(w[0], field<0, 1, 4>(x)), w[1] = or_b(w[1], field<1, 1, 4>(x));
  w[2] = or_b(w[2], field<2, 1, 4>(x)), w[3] = or_b(w[3], field<3, 1, 4>(x));
  w[4] = or_b(w[4], field<4, 1, 4>(x)), w[5] = or_b(w[5], field<5, 1, 4>(x));
  w[6] = or_b(w[6], field<6, 1, 4>(x)), w[7] = or_b(w[7], field<7, 1, 4>(x));
}

inline void two_bits(const uint8_t* p, B* w) {
  B x = load_b(p);
  w[0] = or_b(w[0], field<0, 2, 4>(x)), w[1] = or_b(w[1], field<2, 2, 4>(x));
  w[2] = or_b(w[2], field<4, 2, 4>(x)), w[3] = or_b(w[3], field<6, 2, 4>(x));
}

struct Four {
  static constexpr int bits = 4;
  static void planes(const uint8_t* p, B* w) { nibbles(p, w); }
};
struct Five {
  static constexpr int bits = 5;
  static void planes(const uint8_t* p, B* w) { nibbles(p, w), fifth_bits(p + 256, w); }
};
struct Six {
  static constexpr int bits = 6;
  static void planes(const uint8_t* p, B* w) { nibbles(p, w), two_bits(p + 256, w), two_bits(p + 320, w + 4); }
};
struct Eight {
  static constexpr int bits = 8;
  static void planes(const uint8_t* p, B* w) {
    for (int j = 0; j < 8; ++j) w[j] = kSigned8 ? flip8(load_b(p + 64 * j)) : load_b(p + 64 * j);
  }
};

// Scale kinds: what a block's integers mean.
struct PlainScale {  // w = d * (q - zero)
  static constexpr bool has_min = false, halves = false;
  static constexpr int bytes = 32;  // of a block, its share of the header included
  static void at(const uint8_t* p, int64_t, int64_t b, F& d, F&) { d = load_half((const uint16_t*)p + 16 * b); }
};
struct MinScale {  // w = d * q + m
  static constexpr bool has_min = true, halves = false;
  static constexpr int bytes = 64;
  static void at(const uint8_t* p, int64_t, int64_t b, F& d, F& m) {
    d = load_half((const uint16_t*)p + 32 * b), m = load_half((const uint16_t*)p + 32 * b + 16);
  }
};
struct SuperScale {  // w = (d * sc) * q - (dmin * mn), dmin stored negated
  static constexpr bool has_min = true, halves = false;
  static constexpr int bytes = 40;
  static void at(const uint8_t* p, int64_t blocks, int64_t b, F& d, F& m) {
    const uint16_t* head = (const uint16_t*)(p + b / 8 * 64);
    const uint8_t* sub = p + (blocks + 7) / 8 * 64 + 32 * b;
    d = mul(load_half(head), load_u8(sub)), m = mul(load_half(head + 16), load_u8(sub + 16));
  }
};
struct HalvesScale {  // w = (d * sc of each half) * (q - 32)
  static constexpr bool has_min = false, halves = true;
  static constexpr int bytes = 36;
  static void at(const uint8_t* p, int64_t blocks, int64_t b, F& d, F& m) {
    F head = load_half((const uint16_t*)(p + b / 8 * 32));
    const int8_t* sub = (const int8_t*)(p + (blocks + 7) / 8 * 32 + 32 * b);
    d = mul(head, load_i8(sub)), m = mul(head, load_i8(sub + 16));
  }
};

template <>
struct Format<kQ4_0> : Four, PlainScale {
  static const int32_t* start(const Acts& x) { return x.s8; }
};
template <>
struct Format<kQ4_1> : Four, MinScale {
  static const int32_t* start(const Acts&) { return nullptr; }
};
template <>
struct Format<kQ5_0> : Five, PlainScale {
  static const int32_t* start(const Acts& x) { return x.s16; }
};
template <>
struct Format<kQ5_1> : Five, MinScale {
  static const int32_t* start(const Acts&) { return nullptr; }
};
template <>
struct Format<kQ8_0> : Eight, PlainScale {
  static const int32_t* start(const Acts& x) { return kSigned8 ? nullptr : x.s128; }
};
template <>
struct Format<kQ4_K> : Four, SuperScale {
  static const int32_t* start(const Acts&) { return nullptr; }
};
template <>
struct Format<kQ5_K> : Five, SuperScale {
  static const int32_t* start(const Acts&) { return nullptr; }
};
template <>
struct Format<kQ6_K> : Six, HalvesScale {
  static const int32_t* start(const Acts& x) { return x.s32; }
};

template <int TYPE, int R>
void quant_tile(const uint8_t* group, const Acts& x, int64_t row0, float* y, int64_t ldy, int64_t left) {
  using Q = Format<TYPE>;
  const TypeInfo& t = *type_info(TYPE);
  const int64_t blocks = x.k / kBlock, stride = x.stride;
  const uint8_t* planes = group + scales_size(t, x.k);
  constexpr int plane_bytes = Q::bits * 64, kFetch = plane_bytes + Q::bytes;
  const int8_t* q = x.q + row0 * kBlock;
  const float *d = x.d + row0, *ds = x.ds + row0;
  const int32_t* start = Q::start(x);
  F sum[R];
  for (int r = 0; r < R; ++r) sum[r] = zero();
  for (int64_t b = 0; b < blocks; ++b, planes += plane_bytes, q += stride * kBlock, d += stride, ds += stride) {
    if (R >= fetch_from_rows)
      for (int i = 0; i < kFetch; i += 64) __builtin_prefetch(group + b * kFetch + kFetchAhead + i);
    B w[8];
    Q::planes(planes, w);
    F scale, other = zero();
    Q::at(group, blocks, b, scale, other);
    // Some rows side by side, or some chains in a row, hide the latency of dot products. Integers: the order is free.
    constexpr int kChains = Q::halves ? 2 : kDotWords > 1 ? 1 : R == 1 ? 4 : R < 4 ? 2 : 1;
    constexpr int kWords = kDotWords < 8 / kChains ? kDotWords : 8 / kChains;
    // As many rows at once as leave their sums in registers: up to 8 all of them, more in steps of 4.
    constexpr int kSteps = R <= 8 && !Q::halves ? 1 : (R + 3) / 4, kStep = kDotWords > 1 ? 1 : (R + kSteps - 1) / kSteps;
    each<(R + kStep - 1) / kStep>([&](auto step) HK_INLINE {
      constexpr int r0 = step * kStep, num = R - r0 < kStep ? R - r0 : kStep;
      const int32_t* in = (const int32_t*)(q + r0 * kBlock);
      I part[num][kChains];
      each<num * kChains>([&](auto at) HK_INLINE {
        constexpr int i = at / kChains, c = at % kChains;
        const int64_t from = b * stride + row0 + r0 + i;
        part[i][c] = set_i(!start ? 0 : Q::halves ? start[2 * from + c] : c == 0 ? start[from] : 0);
      });
      each<8 / kWords * num>([&](auto at) HK_INLINE {
        constexpr int i = at / kChains % num, c = at % kChains, j = c * (8 / kChains) + at / kChains / num * kWords;
        part[i][c] = dot<Q::bits, kWords>(w + j, in + 8 * i + j, part[i][c]);
      });
      each<num>([&](auto i) HK_INLINE {
        constexpr int r = r0 + i;
        if constexpr (Q::halves) {
          F both = fma(to_float(part[i][1]), other, mul(to_float(part[i][0]), scale));
          sum[r] = fma(both, set(d[r]), sum[r]);
        } else {
          I all = part[i][0];
          each<kChains - 1>([&](auto c) HK_INLINE { all = add_i(all, part[i][c + 1]); });
          sum[r] = fma(mul(to_float(all), scale), set(d[r]), sum[r]);
          if constexpr (Q::has_min) sum[r] = fma(other, set(ds[r]), sum[r]);
        }
      });
    });
  }
  for (int r = 0; r < R; ++r) put(sum[r], y + r * ldy, left);
}

template <int TYPE>
inline F float_weights(const uint8_t* p, int64_t i) {
  if constexpr (TYPE == kF32) return load((const float*)p + i);
  if constexpr (TYPE == kF16) return load_half((const uint16_t*)p + i);
  if constexpr (TYPE == kBF16) return load_bf16((const uint16_t*)p + i);
}

// G groups side by side hide the latency of the one chain per output that fixed order demands.
template <int TYPE, int R, int G>
void float_tile(const uint8_t* group, int64_t bytes, const Acts& x, int64_t row0, float* y, int64_t ldy, int64_t left) {
  F sum[R][G];
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) sum[r][g] = zero();
  const float* in = x.x + row0 * x.k;
  for (int64_t i = 0; i < x.k; ++i)
    for (int g = 0; g < G; ++g) {
      F w = float_weights<TYPE>(group + g * bytes, i * kLanes);
      for (int r = 0; r < R; ++r) sum[r][g] = fma(w, set(in[r * x.k + i]), sum[r][g]);
    }
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) put(sum[r][g], y + r * ldy + g * kLanes, left - g * kLanes);
}

struct Work {  // one call of `linear`
  const uint8_t* packed;
  const Acts& x;
  int64_t n, rows, g0, g1, ldy, bytes;
  float* y;
};

template <int TYPE, int R>
void quant_rows(const Work& c, int64_t g, int64_t row0) {
  quant_tile<TYPE, R>(c.packed + g * c.bytes, c.x, row0, c.y + row0 * c.ldy + g * kLanes, c.ldy, c.n - g * kLanes);
}

template <int TYPE, int R>
void quant_tail(const Work& c, int64_t g, int64_t row0, int64_t rows) {  // 1 to R rows
  if (rows == R) return quant_rows<TYPE, R>(c, g, row0);
  if constexpr (R > 1) quant_tail<TYPE, R - 1>(c, g, row0, rows);
}

#ifdef HK_TILES
}  // namespace hk::HK_ISA

#include "tiles.inl"

namespace hk::HK_ISA {
#endif

template <int TYPE>
void quant_linear(const Work& c) {
#ifdef HK_TILES
  if (c.rows >= kTileRows && tile_linear<TYPE>(c)) return;
#endif
  for (int64_t g = c.g0; g < c.g1; ++g) {
    int64_t row = 0;
    for (; row + kMaxRows <= c.rows; row += kMaxRows) quant_rows<TYPE, kMaxRows>(c, g, row);
    if (row < c.rows) quant_tail<TYPE, kMaxRows>(c, g, row, c.rows - row);
  }
}

template <int TYPE, int R, int G>
void float_rows(const Work& c, int64_t g, int64_t row0) {
  float_tile<TYPE, R, G>(c.packed + g * c.bytes, c.bytes, c.x, row0, c.y + row0 * c.ldy + g * kLanes, c.ldy,
                         c.n - g * kLanes);
}

template <int TYPE, int R>
void float_tail(const Work& c, int64_t row0, int64_t rows) {
  if (rows == R) {
    constexpr int G = R * 4 <= kMaxRows ? 4 : R * 2 <= kMaxRows ? 2 : 1;
    int64_t g = c.g0;
    for (; g + G <= c.g1; g += G) float_rows<TYPE, R, G>(c, g, row0);
    for (; g < c.g1; ++g) float_rows<TYPE, R, 1>(c, g, row0);
  } else if constexpr (R > 1) {
    float_tail<TYPE, R - 1>(c, row0, rows);
  }
}

template <int TYPE>
void float_linear(const Work& c) {
  for (int64_t row = 0; row < c.rows; row += kMaxRows)
    float_tail<TYPE, kMaxRows>(c, row, c.rows - row < kMaxRows ? c.rows - row : kMaxRows);
}

void linear(int type, const uint8_t* packed, int64_t n, const Acts& x, int64_t rows, int64_t g0, int64_t g1, float* y,
            int64_t ldy) {
  Work c{packed, x, n, rows, g0, g1, ldy, group_size(*type_info(type), x.k), y};
  switch (type) {
    case kF32: return float_linear<kF32>(c);
    case kF16: return float_linear<kF16>(c);
    case kBF16: return float_linear<kBF16>(c);
    case kQ4_0: return quant_linear<kQ4_0>(c);
    case kQ4_1: return quant_linear<kQ4_1>(c);
    case kQ5_0: return quant_linear<kQ5_0>(c);
    case kQ5_1: return quant_linear<kQ5_1>(c);
    case kQ8_0: return quant_linear<kQ8_0>(c);
    case kQ4_K: return quant_linear<kQ4_K>(c);
    case kQ5_K: return quant_linear<kQ5_K>(c);
    case kQ6_K: return quant_linear<kQ6_K>(c);
  }
}

}  // namespace hk::HK_ISA
