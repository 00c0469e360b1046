// The operations that bound a forward, with everything at hand: what `hyflash bench --costs` calls the floor.

namespace hk::HK_ISA {

#ifdef HK_TILES
inline int64_t some_dots(const uint8_t* data, int64_t bytes, int64_t passes, float* sink) {  // on whole tiles
  constexpr int64_t tile = 16 * 64;
  TileConfig c;
  for (int i = 0; i < 8; ++i) c.rows[i] = 16, c.bytes_per_row[i] = 64;
  load_config(c);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(6);
  _tile_zero(7);
  _tile_loadd(2, data, 64);
  _tile_loadd(3, data + tile, 64);
  for (int64_t pass = 0; pass < passes; ++pass)
    for (int64_t at = 0; at + 2 * tile <= bytes; at += 2 * tile) {
      _tile_loadd(4, data + at, 64);
      _tile_loadd(5, data + at + tile, 64);
      _tile_dpbssd(0, 4, 2);
      _tile_dpbssd(1, 4, 3);
      _tile_dpbssd(6, 5, 2);
      _tile_dpbssd(7, 5, 3);
    }
  alignas(64) int32_t sums[16 * kLanes];
  F total = zero();
  auto take = [&] { total = add(total, to_float(_mm512_load_si512(sums))); };
  _tile_stored(0, sums, 64);
  take();
  _tile_stored(1, sums, 64);
  take();
  _tile_stored(6, sums, 64);
  take();
  _tile_stored(7, sums, 64);
  take();
  _tile_release();
  store(sink, total);
  return passes * (bytes / (2 * tile)) * 4 * 16 * kLanes * 64;
}
#else
inline int64_t some_dots(const uint8_t* data, int64_t bytes, int64_t passes, float* sink) {
  constexpr int64_t step = kMaxRows * kBlock;
  B w[8];
  for (int j = 0; j < 8; ++j) w[j] = low4(load_b(data + 64 * j));
  I sum[kMaxRows];
  for (int r = 0; r < kMaxRows; ++r) sum[r] = set_i(0);
  for (int64_t pass = 0; pass < passes; ++pass)
    for (int64_t at = 0; at + step <= bytes; at += step)
      for (int r = 0; r < kMaxRows; ++r) sum[r] = dot<4, 8>(w, (const int32_t*)(data + at + r * kBlock), sum[r]);
  F total = zero();
  for (int r = 0; r < kMaxRows; ++r) total = add(total, to_float(sum[r]));
  store(sink, total);
  return passes * (bytes / step) * kMaxRows * kLanes * kBlock;
}
#endif

inline int64_t some_fmas(const uint8_t* data, int64_t bytes, int64_t passes, float* sink) {
  constexpr int kChains = kMaxRows > 4 ? 16 : 5;  // hide an fma's latency, fit in the registers
  const float* x = (const float*)data;
  const int64_t count = bytes / 4 / kChains;
  F sum[kChains];
  for (int c = 0; c < kChains; ++c) sum[c] = set(1);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const F w = load(x + pass % 16);
    for (int64_t i = 0; i < count; ++i)
      for (int c = 0; c < kChains; ++c) sum[c] = fma(set(x[i * kChains + c]), w, sum[c]);
  }
  for (int c = 1; c < kChains; ++c) sum[0] = add(sum[0], sum[c]);
  store(sink, sum[0]);
  return passes * count * kChains * kLanes;
}

inline int64_t some_reads(const uint8_t* data, int64_t bytes, int64_t passes, float* sink) {
  constexpr int kVectors = 4;
  B all[kVectors];
  for (int i = 0; i < kVectors; ++i) all[i] = load_b(data);
  for (int64_t pass = 0; pass < passes; ++pass)
    for (int64_t at = 0; at + 64 * kVectors <= bytes; at += 64 * kVectors)
      for (int i = 0; i < kVectors; ++i) all[i] = or_b(all[i], load_b(data + at + 64 * i));
  const int32_t one[kVectors] = {1, 1, 1, 1};
  store(sink, to_float(dot<4, kVectors>(all, one, set_i(0))));
  return passes * bytes;
}

int64_t exercise(int what, const uint8_t* data, int64_t bytes, int64_t passes, float* sink) {
  switch (what) {
    case 0: return some_dots(data, bytes, passes, sink);
    case 1: return some_fmas(data, bytes, passes, sink);
    default: return some_reads(data, bytes, passes, sink);
  }
}

}  // namespace hk::HK_ISA
