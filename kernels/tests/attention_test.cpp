// Attention over pages of keys and values against float64: every kind of cache, windows, soft-caps and the borders of
// pages and splits; a row alone has the bits it has among others; what a row may not see cannot reach it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "../src/acts.h"
#include "../src/half.h"
#include "check.h"

using namespace hk;

namespace {

struct Case {
  int kv, dim, window;
  float cap;
};

// Pages of one head, filled token by token.
struct Cache {
  Cache(const Kernels& k, const Case& c, const std::vector<float>& key, const std::vector<float>& value)
      : bytes(round_up(page_size(c.kv, c.dim), 64)), pages(int64_t(key.size()) / c.dim / kPage + 4) {
    memory = make_buffer<uint8_t>(2 * pages * bytes);
    std::memset(memory.get(), 0, size_t(2 * pages * bytes));
    for (int64_t t = 0; t * c.dim < int64_t(key.size()); ++t) {
      k.append_kv(c.kv, false, &key[size_t(t * c.dim)], c.dim, int(t % kPage), page(t / kPage, 0));
      k.append_kv(c.kv, true, &value[size_t(t * c.dim)], c.dim, int(t % kPage), page(t / kPage, 1));
    }
  }
  uint8_t* page(int64_t index, int which) const { return memory.get() + (which * pages + index) * bytes; }
  int64_t bytes, pages;
  Buffer<uint8_t> memory;
};

// What the cache keeps of a token's key or value.
std::vector<double> stored(int kv, const float* x, int dim) {
  std::vector<double> out(static_cast<size_t>(dim));
  float most = 0;
  for (int d = 0; d < dim; ++d) most = std::max(most, std::fabs(x[d]));
  for (int d = 0; d < dim; ++d) {
    if (kv == kKvF32) out[size_t(d)] = double(x[d]);
    if (kv == kKvF16) out[size_t(d)] = double(half_to_float(float_to_half(x[d])));
    if (kv == kKvBF16) out[size_t(d)] = double(bf16_to_float(float_to_bf16(x[d])));
    if (kv == kKvI8) out[size_t(d)] = most > 0 ? std::nearbyint(x[d] * (127.0f / most)) * double(most / 127.0f) : 0.0;
  }
  return out;
}

std::vector<double> reference(const Case& c, const std::vector<float>& key, const std::vector<float>& value,
                              const float* query, int64_t pos) {
  std::vector<double> out(static_cast<size_t>(c.dim)), scores;
  const int64_t first = c.window ? std::max<int64_t>(0, pos - c.window + 1) : 0;
  double most = -INFINITY, total = 0;
  for (int64_t t = first; t <= pos; ++t) {
    const auto k = stored(c.kv, &key[size_t(t * c.dim)], c.dim);
    double score = 0;
    for (int d = 0; d < c.dim; ++d) score += k[size_t(d)] * double(query[d]);
    if (c.cap > 0) score = double(c.cap) * std::tanh(score / double(c.cap));
    scores.push_back(score), most = std::max(most, score);
  }
  for (int64_t t = first; t <= pos; ++t) {
    const double weight = std::exp(scores[size_t(t - first)] - most);
    const auto v = stored(c.kv, &value[size_t(t * c.dim)], c.dim);
    for (int d = 0; d < c.dim; ++d) out[size_t(d)] += weight * v[size_t(d)];
    total += weight;
  }
  for (double& x : out) x /= total;
  return out;
}

// As a forward does it: split after split, merged in order.
std::vector<float> attend(const Kernels& k, const Case& c, const Cache& cache, const std::vector<const float*>& queries,
                          const std::vector<int64_t>& positions) {
  const size_t num = queries.size(), dim = size_t(c.dim);
  std::vector<float> result(num * dim), part(num * dim), maximum(num), total(num), best(num, -INFINITY), sum(num);
  std::vector<float> scratch(kMaxQueries * kSplit);
  std::vector<float*> outs(num);
  for (size_t i = 0; i < num; ++i) outs[i] = &part[i * dim];
  const int64_t last = *std::max_element(positions.begin(), positions.end());
  for (int64_t begin = 0; begin <= last; begin += kSplit) {
    const uint8_t *keys[kSplit / kPage] = {}, *values[kSplit / kPage] = {};
    for (int64_t g = 0; g < kSplit / kPage && begin + g * kPage <= last; ++g)
      keys[g] = cache.page(begin / kPage + g, 0), values[g] = cache.page(begin / kPage + g, 1);
    const Split split{keys,           values,           nullptr,     begin,       c.dim,         c.window,    c.cap, int(num),
                      queries.data(), positions.data(), outs.data(), maximum.data(), total.data(), scratch.data()};
    k.attend_split(c.kv, split);
    for (size_t i = 0; i < num; ++i)
      k.merge_split(&best[i], &sum[i], &result[i * dim], maximum[i], total[i], outs[i], c.dim);
  }
  for (size_t i = 0; i < num; ++i) k.finish_attention(&result[i * dim], sum[i], c.dim);
  return result;
}

void rows_agree_with_float64(const Kernels& k, const Case& c, int64_t context) {
  constexpr int64_t kRows = 5, kHeads = 3;
  const int64_t tokens = context + kRows;
  const auto key = normal(size_t(tokens * c.dim)), value = normal(size_t(tokens * c.dim));
  const auto query = normal(size_t(kRows * kHeads * c.dim), 2.0f / std::sqrt(float(c.dim)));
  const Cache cache(k, c, key, value);
  std::vector<const float*> queries;
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < kRows * kHeads; ++i)
    queries.push_back(&query[size_t(i * c.dim)]), positions.push_back(context + i / kHeads);
  const auto got = attend(k, c, cache, queries, positions);
  const size_t dim = size_t(c.dim);
  for (size_t i = 0; i < queries.size(); ++i) {
    const auto want = reference(c, key, value, queries[i], positions[i]);
    double error = 0;
    for (size_t d = 0; d < dim; ++d) error = std::max(error, std::fabs(double(got[i * dim + d]) - want[d]));
    check(error < 1e-5, "%s: attention of cache %d, dim %d, window %d, cap %g, context %d is off by %g", k.name, c.kv,
          c.dim, c.window, double(c.cap), int(context), error);
    const auto alone = attend(k, c, cache, {queries[i]}, {positions[i]});
    check(std::memcmp(alone.data(), &got[i * dim], dim * 4) == 0,
          "%s: a row alone has other bits: cache %d, dim %d, context %d", k.name, c.kv, c.dim, int(context));
  }
}

// Later rows of the block and what rejected tokens left behind may hold anything.
void unseen_tokens_do_not_matter(const Kernels& k, const Case& c, float poison) {
  const int64_t context = 250, tokens = 270;
  auto key = normal(size_t(tokens * c.dim)), value = normal(size_t(tokens * c.dim));
  const auto query = normal(size_t(8 * c.dim), 0.2f);
  std::vector<const float*> queries;
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < 8; ++i) queries.push_back(&query[size_t(i * c.dim)]), positions.push_back(context + i);
  const auto want = attend(k, c, Cache(k, c, key, value), queries, positions);
  const int64_t last = context + 4;  // rows 0 to 4 see finite tokens alone
  for (int64_t t = last + 1; t < tokens; ++t)
    for (int d = 0; d < c.dim; ++d) key[size_t(t * c.dim + d)] = value[size_t(t * c.dim + d)] = poison;
  const auto got = attend(k, c, Cache(k, c, key, value), queries, positions);
  const size_t dim = size_t(c.dim);
  check(std::memcmp(got.data(), want.data(), 5 * dim * 4) == 0, "%s: cache %d lets %g reach a row before it", k.name,
        c.kv, double(poison));
  for (size_t i = 5 * dim; i < 8 * dim; ++i)
    check(!(std::fabs(got[i]) < 1e30f), "%s: cache %d hides %g from a row that sees it", k.name, c.kv, double(poison));
}

}  // namespace

int main() {
  for (const Kernels* k : tables()) {
    for (int kv : {kKvF16, kKvBF16, kKvF32, kKvI8}) {
      for (int64_t context : {0, 1, 60, 63, 64, 65, 250, 255, 256, 257, 511, 600}) {
        rows_agree_with_float64(*k, {kv, 64, 0, 0.0f}, context);
        for (int window : {1, 30, 64, 300}) rows_agree_with_float64(*k, {kv, 16, window, 0.0f}, context);
        rows_agree_with_float64(*k, {kv, 80, 0, 3.0f}, context);
      }
      for (int dim : {32, 96, 128, 256}) rows_agree_with_float64(*k, {kv, dim, 100, 20.0f}, 300);
      for (float poison : {NAN, INFINITY, -INFINITY}) unseen_tokens_do_not_matter(*k, {kv, 64, 0, 0.0f}, poison);
    }
  }
  return report("attention");
}
