// Linear layers on AMX: a decoded block of weights is a tile of 8 x 64 bytes, activations of up to 16 rows are one of
// rows x 32 bytes, and one instruction gives all their dot products. Those are exact integers, and what follows is the
// same arithmetic in the same order as in linear.inl, so the bits are the same too.

namespace hk::HK_ISA {

constexpr int kTileRows = kMaxRows < 9 ? kMaxRows : 9;  // from this many rows on tiles are faster than vectors

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
inline HK_INLINE void decode_to(const uint8_t* planes, uint8_t* out) {
  B w[8];
  Format<TYPE>::planes(planes, w);
  each<8>([&](auto j) HK_INLINE {
    if constexpr (zero_of<TYPE>() != 0) w[j] = _mm512_sub_epi8(w[j], _mm512_set1_epi8(char(zero_of<TYPE>())));
    _mm512_store_si512(out + 64 * j, w[j]);
  });
}

// Dot products of some rows with one block (or half of it), 16 int32 a row; SLOT says which tiles to use.
template <int SLOT>
inline HK_INLINE void tile_dots(const uint8_t* w, const int8_t* q, int32_t* out) {
  if constexpr (SLOT == 0) {
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

constexpr int kLead = 2;         // blocks from decoding to the tile, and from there to the sums
constexpr int kRing = 4 * kLead;  // decoded blocks, and their dot products, that are kept

// R rows of a group. With DECODE block b is decoded to place b & mask of `decoded`; else it lies there.
template <int TYPE, int R, bool DECODE>
void tile_rows(const Work& c, int64_t g, int64_t row0, uint8_t* decoded, int64_t mask) {
  using Q = Format<TYPE>;
  const Acts& x = c.x;
  const uint8_t* group = c.packed + g * c.bytes;
  const uint8_t* planes = group + scales_size(*type_info(TYPE), x.k);
  const int64_t blocks = x.k / kBlock;
  constexpr int plane_bytes = Q::bits * 64, kFetch = plane_bytes + Q::bytes;
  alignas(64) int32_t dots[kRing][(Q::halves ? 2 : 1) * R * kLanes];
  F sum[R];
  each<R>([&](auto r) HK_INLINE { sum[r] = zero(); });
  auto decode = [&](int64_t b) HK_INLINE {
    if (!DECODE || b >= blocks) return;
    for (int i = 0; i < kFetch; i += 64) __builtin_prefetch(group + b * kFetch + kFetchAhead + i);
    decode_to<TYPE>(planes + b * plane_bytes, decoded + (b & mask) * 512);
  };
  auto multiply = [&](int64_t b) HK_INLINE {
    if (b >= blocks) return;
    const uint8_t* w = decoded + (b & mask) * 512;
    const int8_t* q = x.q + (b * x.stride + row0) * kBlock;
    int32_t* out = dots[b % kRing];
    if constexpr (Q::halves)
      tile_dots<0>(w, q, out), tile_dots<1>(w + 256, q + 16, out + R * kLanes);
    else if (b % 2)
      tile_dots<1>(w, q, out);
    else
      tile_dots<0>(w, q, out);
  };
  auto add_up = [&](int64_t b) HK_INLINE {
    F scale, other = zero();
    Q::at(group, blocks, b, scale, other);
    const float *d = x.d + b * x.stride + row0, *ds = x.ds + b * x.stride + row0;
    const int32_t* in = dots[b % kRing];
    each<R>([&](auto r) HK_INLINE {
      F first = to_float(_mm512_load_si512(in + r * kLanes));
      if constexpr (Q::halves) {
        F both = fma(to_float(_mm512_load_si512(in + (R + r) * kLanes)), other, mul(first, scale));
        sum[r] = fma(both, set(d[r]), sum[r]);
      } else {
        sum[r] = fma(mul(first, scale), set(d[r]), sum[r]);
        if constexpr (Q::has_min) sum[r] = fma(other, set(ds[r]), sum[r]);
      }
    });
  };
  // Three things go on at a time, some blocks apart, for one has to wait for the memory of the other.
  for (int64_t b = 0; b < 2 * kLead; ++b) decode(b);
  for (int64_t b = 0; b < kLead; ++b) multiply(b);
  for (int64_t b = 0; b < blocks; ++b) decode(b + 2 * kLead), multiply(b + kLead), add_up(b);
  each<R>([&](auto r) HK_INLINE {
    put(sum[r], c.y + (row0 + r) * c.ldy + g * kLanes, c.n - g * kLanes);
  });
}

template <int TYPE, int R>
void tile_pass(const Work& c, int64_t row0, int64_t rows, uint8_t* decoded) {  // kTileRows to R rows, the last ones
  if (rows == R) {
    configure_tiles(R, Format<TYPE>::halves);
    for (int64_t g = c.g0; g < c.g1; ++g) tile_rows<TYPE, R, true>(c, g, row0, decoded, kRing - 1);
  } else if constexpr (R > kTileRows) {
    tile_pass<TYPE, R - 1>(c, row0, rows, decoded);
  }
}

// Memory of one thread for decoded blocks.
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
  const int64_t blocks = c.x.k / kBlock, full = c.rows / 16 * 16, rest = c.rows - full;
  uint8_t* decoded = memory.room_for(blocks > kRing ? blocks : kRing);
  if (!decoded) return false;
  if (full == 16) {
    tile_pass<TYPE, 16>(c, 0, 16, decoded);
  } else if (full) {  // all blocks of a group stay decoded for the rows to come
    configure_tiles(16, Format<TYPE>::halves);
    for (int64_t g = c.g0; g < c.g1; ++g) {
      tile_rows<TYPE, 16, true>(c, g, 0, decoded, -1);
      for (int64_t row = 16; row < full; row += 16) tile_rows<TYPE, 16, false>(c, g, row, decoded, -1);
    }
  }
  if (rest >= kTileRows) tile_pass<TYPE, 15>(c, full, rest, decoded);
  _tile_release();
  for (int64_t g = c.g0; rest && rest < kTileRows && g < c.g1; ++g) quant_tail<TYPE, kTileRows - 1>(c, g, full, rest);
  return true;
}

}  // namespace hk::HK_ISA
