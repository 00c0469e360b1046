// Linear layers on AMX: a decoded block of weights is a tile of 8 x 64 bytes, activations of up to 16 rows are one of
// rows x 32 bytes, and one instruction gives all their dot products. Those are exact integers, and what follows is the
// same arithmetic in the same order as in linear.inl, so the bits are the same too.

namespace hk::HK_ISA {

constexpr int kTileRows = kMaxRows < 12 ? kMaxRows : 12;  // from this many rows on tiles are faster than vectors

// Tiles: 0 and 1 sums, 2 and 3 weights, 4 and 5 activations.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// GCC's intrinsic claims to read 8 bytes of the 64, and the stores to the others could be dropped as dead.
inline void load_config(const TileConfig& c) {
  asm volatile("" : : "r"(&c) : "memory");
  _tile_loadconfig(&c);
}

inline void configure_tiles(int rows, bool halves) {
  TileConfig c;
  for (int i = 0; i < 2; ++i) {
    c.rows[i] = uint8_t(rows), c.bytes_per_row[i] = 64;
    c.rows[2 + i] = halves ? 4 : 8, c.bytes_per_row[2 + i] = 64;
    c.rows[4 + i] = uint8_t(rows), c.bytes_per_row[4 + i] = halves ? 16 : 32;
  }
  load_config(c);
}

template <int TYPE>
constexpr int zero_of() {  // what the stored integers have on top
  return TYPE == kQ4_0 ? 8 : TYPE == kQ5_0 ? 16 : TYPE == kQ6_K ? 32 : TYPE == kQ8_0 ? 128 : 0;
}

template <int TYPE>
inline void decode_to(const uint8_t* planes, uint8_t* out) {
  B w[8];
  Format<TYPE>::planes(planes, w);
  for (int j = 0; j < 8; ++j) {
    if constexpr (zero_of<TYPE>() != 0) w[j] = _mm512_sub_epi8(w[j], _mm512_set1_epi8(char(zero_of<TYPE>())));
    _mm512_store_si512(out + 64 * j, w[j]);
  }
}

// Dot products of block b of R rows, (R, 16) int32, or two of them for halves; SLOT says which tiles to use.
template <int TYPE, int SLOT>
inline void tile_dots(const uint8_t* w, const int8_t* q, int32_t* out) {
  if constexpr (Format<TYPE>::halves) {
    _tile_zero(0);
    _tile_loadd(2, w, 64);
    _tile_loadd(4, q, kBlock);
    _tile_dpbssd(0, 4, 2);
    _tile_stored(0, out, 64);
    _tile_zero(1);
    _tile_loadd(3, w + 256, 64);
    _tile_loadd(5, q + 16, kBlock);
    _tile_dpbssd(1, 5, 3);
    _tile_stored(1, out + 16 * kLanes, 64);
  } else if constexpr (SLOT == 0) {
    _tile_zero(0);
    _tile_loadd(2, w, 64);
    _tile_loadd(4, q, kBlock);
    _tile_dpbssd(0, 4, 2);
    _tile_stored(0, out, 64);
  } else {
    _tile_zero(1);
    _tile_loadd(3, w, 64);
    _tile_loadd(5, q, kBlock);
    _tile_dpbssd(1, 5, 3);
    _tile_stored(1, out, 64);
  }
}

// `decoded` has room for all blocks of the group; with DECODE it is filled, else it is read.
template <int TYPE, int R, bool DECODE>
void tile_rows(const uint8_t* group, const Acts& x, int64_t row0, float* y, int64_t ldy, int64_t left, uint8_t* decoded) {
  using Q = Format<TYPE>;
  const TypeInfo& t = *type_info(TYPE);
  const int64_t blocks = x.k / kBlock, stride = x.stride;
  const uint8_t* planes = group + scales_size(t, x.k);
  constexpr int plane_bytes = Q::bits * 64, kFetch = plane_bytes + Q::bytes;
  constexpr int kAhead = 4, kDots = (Q::halves ? 32 : 16) * kLanes;
  alignas(64) int32_t dots[2 * kAhead][kDots];
  F sum[R];
  for (int r = 0; r < R; ++r) sum[r] = zero();
  auto decode = [&](int64_t first) {
    for (int64_t b = first; DECODE && b < first + kAhead && b < blocks; ++b) {
      for (int i = 0; i < kFetch; i += 64) __builtin_prefetch(group + b * kFetch + kFetchAhead + i);
      decode_to<TYPE>(planes + b * plane_bytes, decoded + b * 512);
    }
  };
  auto start = [&](int64_t first) {
    for (int64_t b = first; b < first + kAhead && b < blocks; ++b) {
      const int8_t* q = x.q + (b * stride + row0) * kBlock;
      if (b % 2)
        tile_dots<TYPE, 1>(decoded + b * 512, q, dots[b % (2 * kAhead)]);
      else
        tile_dots<TYPE, 0>(decoded + b * 512, q, dots[b % (2 * kAhead)]);
    }
  };
  // Three things go on at a time, some blocks apart, for one has to wait for the memory of the other.
  decode(0), decode(kAhead), start(0);
  for (int64_t b = 0; b < blocks; ++b) {
    if (b % kAhead == 0) decode(b + 2 * kAhead), start(b + kAhead);
    F scale, other = zero();
    Q::at(group, blocks, b, scale, other);
    const float *d = x.d + b * stride + row0, *ds = x.ds + b * stride + row0;
    const int32_t* in = dots[b % (2 * kAhead)];
    for (int r = 0; r < R; ++r) {
      F first = to_float(_mm512_load_si512(in + r * kLanes));
      if constexpr (Q::halves) {
        F both = fma(to_float(_mm512_load_si512(in + (16 + r) * kLanes)), other, mul(first, scale));
        sum[r] = fma(both, set(d[r]), sum[r]);
      } else {
        sum[r] = fma(mul(first, scale), set(d[r]), sum[r]);
        if constexpr (Q::has_min) sum[r] = fma(other, set(ds[r]), sum[r]);
      }
    }
  }
  for (int r = 0; r < R; ++r) put(sum[r], y + r * ldy, left);
}

template <int TYPE, int R, bool DECODE>
void tile_tail(const Work& c, int64_t g, int64_t row0, int64_t rows, uint8_t* decoded) {  // kTileRows to R rows
  if (rows == R)
    return tile_rows<TYPE, R, DECODE>(c.packed + g * c.bytes, c.x, row0, c.y + row0 * c.ldy + g * kLanes, c.ldy,
                                      c.n - g * kLanes, decoded);
  if constexpr (R > kTileRows) tile_tail<TYPE, R - 1, DECODE>(c, g, row0, rows, decoded);
}

// Memory of one thread for the decoded blocks of a group.
class Decoded {
 public:
  ~Decoded() { ::operator delete[](memory_, std::align_val_t(64)); }
  uint8_t* room_for(int64_t blocks) {  // nullptr when there is no memory
    if (blocks > blocks_) {
      ::operator delete[](memory_, std::align_val_t(64));
      memory_ = static_cast<uint8_t*>(::operator new[](size_t(blocks) * 512, std::align_val_t(64), std::nothrow));
      blocks_ = memory_ ? blocks : 0;
    }
    return memory_;
  }

 private:
  uint8_t* memory_ = nullptr;
  int64_t blocks_ = 0;
};

// False when there is no memory; the vectors give the same bits.
template <int TYPE>
bool tile_linear(const Work& c) {
  static thread_local Decoded memory;
  uint8_t* decoded = memory.room_for(c.x.k / kBlock);
  if (!decoded) return false;
  const int64_t full = c.rows / 16 * 16, rest = c.rows - full;
  if (full) configure_tiles(16, Format<TYPE>::halves);
  for (int64_t g = c.g0; full && g < c.g1; ++g) {
    tile_tail<TYPE, 16, true>(c, g, 0, 16, decoded);
    for (int64_t row = 16; row < full; row += 16) tile_tail<TYPE, 16, false>(c, g, row, 16, decoded);
  }
  if (rest >= kTileRows) {
    configure_tiles(int(rest), Format<TYPE>::halves);
    for (int64_t g = c.g0; g < c.g1; ++g) tile_tail<TYPE, 16, true>(c, g, full, rest, decoded);
  }
  _tile_release();
  for (int64_t g = c.g0; rest && rest < kTileRows && g < c.g1; ++g) quant_tail<TYPE, kTileRows>(c, g, full, rest);
  return true;
}

}  // namespace hk::HK_ISA
