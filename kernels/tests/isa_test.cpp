// Every instruction set that runs here gives the bits of the portable one, for every kernel in the table.
// Under an emulator it checks other CPUs too.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "../src/acts.h"
#include "../src/half.h"
#include "../src/pack.h"
#include "check.h"

using namespace hk;

namespace {
std::mt19937 rng(2);

void same(const char* isa, const char* what, int a, int b, const void* x, const void* y, size_t bytes) {
  check(std::memcmp(x, y, bytes) == 0, "%s differs from portable: %s %d %d", isa, what, a, b);
}

// Random GGUF rows with finite scales.
std::vector<uint8_t> random_rows(int type, int64_t n, int64_t k) {
  const TypeInfo& t = *type_info(type);
  std::vector<uint8_t> out(size_t(n * (k / t.block) * t.block_bytes));
  for (uint8_t& b : out) b = uint8_t(rng());
  for (size_t at = 0; at < out.size(); at += size_t(t.block_bytes)) {
    const float d = normal(1, 0.05f)[0];
    auto half = [&](size_t offset) {
      const uint16_t h = float_to_half(d);
      std::memcpy(&out[at + offset], &h, 2);
    };
    if (type == kF32) std::memcpy(&out[at], &d, 4);
    if (type == kF16) half(0);
    if (type == kBF16) {
      const uint16_t h = float_to_bf16(d);
      std::memcpy(&out[at], &h, 2);
    }
    if (t.float_bytes) continue;
    if (type == kQ6_K) half(208);
    if (type != kQ6_K) half(0);
    if (type == kQ4_1 || type == kQ5_1 || type == kQ4_K || type == kQ5_K) half(2);
  }
  return out;
}

void linear_layers(const Kernels& ref, const Kernels& k) {
  for (int type : {kF32, kF16, kBF16, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K}) {
    const int64_t inputs = type_info(type)->block == kSuper ? 512 : 96, n = 37, groups = 3;
    const auto rows = random_rows(type, n, inputs);
    auto packed = make_buffer<uint8_t>(groups * group_size(*type_info(type), inputs));
    pack(type, n, inputs, rows.data(), 0, groups, packed.get());
    auto x = normal(size_t(33 * inputs));
    for (int64_t i = 0; i < inputs; ++i) {
      x[size_t(3 * inputs + i)] = 0;
      x[size_t(4 * inputs + i)] *= 1e4f;
      x[size_t(5 * inputs + i)] *= 1e-38f;
    }
    x[size_t(6 * inputs + 7)] = INFINITY;
    for (int m : {1, 2, 4, 5, 16, 33}) {
      std::vector<float> y[2] = {std::vector<float>(size_t(m * n)), std::vector<float>(size_t(m * n))};
      ActsBuffer a(m, inputs, true), b(m, inputs, true);
      for (int r = 0; r < m; ++r) {
        ref.quantize(x.data() + r * inputs, inputs, a.acts, r, 0, inputs / kBlock);
        k.quantize(x.data() + r * inputs, inputs, b.acts, r, 0, inputs / kBlock);
      }
      same(k.name, "quantize", type, m, a.acts.q, b.acts.q, size_t(m * inputs));
      ref.linear(type, packed.get(), n, a.acts, m, 0, groups, y[0].data(), n);
      k.linear(type, packed.get(), n, b.acts, m, 0, groups, y[1].data(), n);
      for (float& v : y[0]) v = v == v ? v : 0;  // payloads of NaN may differ
      for (float& v : y[1]) v = v == v ? v : 0;
      same(k.name, "linear", type, m, y[0].data(), y[1].data(), y[0].size() * 4);
    }
  }
}

void rows(const Kernels& ref, const Kernels& k) {
  for (int n : {1, 15, 16, 100, 577}) {
    auto x = normal(size_t(n), 5.0f), w = normal(size_t(n));
    x[0] = -90.0f, x[size_t(n / 2)] = 90.0f;
    std::vector<float> a(x.size()), b(x.size());
    ref.rms_norm(x.data(), w.data(), n, 1e-5f, a.data()), k.rms_norm(x.data(), w.data(), n, 1e-5f, b.data());
    same(k.name, "rms_norm", n, 0, a.data(), b.data(), a.size() * 4);
    for (int act : {kSilu, kGelu}) {
      ref.gated(act, x.data(), w.data(), n, a.data()), k.gated(act, x.data(), w.data(), n, b.data());
      same(k.name, "gated", n, act, a.data(), b.data(), a.size() * 4);
    }
    a = b = x;
    ref.scale_and_cap(a.data(), n, 0.7f, 30.0f), k.scale_and_cap(b.data(), n, 0.7f, 30.0f);
    same(k.name, "scale_and_cap", n, 0, a.data(), b.data(), a.size() * 4);
  }
}

void attention(const Kernels& ref, const Kernels& k) {
  for (int kv : {kKvF16, kKvBF16, kKvF32, kKvI8})
    for (int dim : {16, 64, 80}) {
      const int64_t size = page_size(kv, dim);
      const Kernels* tables[2] = {&ref, &k};
      std::vector<float> results[2];
      const auto key = normal(size_t(256 * dim)), value = normal(size_t(256 * dim));
      const auto query = normal(size_t(9 * dim), 0.3f);
      for (int which = 0; which < 2; ++which) {
        std::vector<std::vector<uint8_t>> pages(8, std::vector<uint8_t>(size_t(size)));
        for (int t = 0; t < 256; ++t) {
          uint8_t *to_keys = pages[size_t(t / kPage)].data(), *to_values = pages[size_t(4 + t / kPage)].data();
          tables[which]->append_kv(kv, false, &key[size_t(t * dim)], dim, t % kPage, to_keys);
          tables[which]->append_kv(kv, true, &value[size_t(t * dim)], dim, t % kPage, to_values);
        }
        const uint8_t *keys[4], *values[4];
        for (int g = 0; g < 4; ++g) keys[g] = pages[size_t(g)].data(), values[g] = pages[size_t(4 + g)].data();
        for (int window : {0, 30}) {
          std::vector<float> out(size_t(9 * dim)), stats(18), scratch(kMaxQueries * kSplit);
          std::vector<float> merged(static_cast<size_t>(dim));
          const float* q[9];
          float* o[9];
          int64_t pos[9];
          for (int i = 0; i < 9; ++i) {
            q[i] = &query[size_t(i * dim)], o[i] = &out[size_t(i * dim)];
            pos[i] = 60 + i / 3 * 40;
          }
          const Split s{keys, values, nullptr, 0, dim, window, 0, 9, q, pos, o, stats.data(), stats.data() + 9, scratch.data()};
          tables[which]->attend_split(kv, s);
          float best = -INFINITY, total = 0;
          for (int i = 0; i < 3; ++i)
            tables[which]->merge_split(&best, &total, merged.data(), stats[size_t(i)], stats[size_t(9 + i)], o[i], dim);
          tables[which]->finish_attention(merged.data(), total, dim);
          for (const auto& part : {out, stats, merged})
            results[which].insert(results[which].end(), part.begin(), part.end());
        }
      }
      same(k.name, "attention", kv, dim, results[0].data(), results[1].data(), results[0].size() * 4);
    }
}
}  // namespace

int main() {
  const Kernels& ref = *kernels_named("portable");
  for (const Kernels* k : tables()) linear_layers(ref, *k), rows(ref, *k), attention(ref, *k);
  return report("isa");
}
