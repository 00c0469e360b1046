// Conversions for every half and bfloat16; exp, tanh, SiLU, GELU and RMSNorm against float64, over all of float32.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "../src/acts.h"
#include "../src/half.h"
#include "../src/pack.h"
#include "check.h"

#define HK_ISA probe
#include "../src/vec_portable.h"

#include "../src/rows.inl"

using namespace hk;

namespace {

double exact_half(int h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return h & 0x8000 ? -size : size;
}

void every_half_converts() {
  for (int h = 0; h < 0x10000; ++h) {
    const float f = half_to_float(uint16_t(h));
    if ((h & 0x7c00) == 0x7c00) {
      check((h & 1023) ? f != f : std::isinf(f) && std::signbit(f) == (h >> 15), "half %x reads %g", h, double(f));
      const int back = float_to_half(f);
      check((back & 0x7c00) == 0x7c00 && !(back & 1023) == !(h & 1023), "half %x comes back as %x", h, back);
      continue;
    }
    check(double(f) == exact_half(h), "half %x reads %g", h, double(f));
    check(float_to_half(f) == h, "half %x comes back as %x", h, float_to_half(f));
  }
  check(float_to_half(65519.996f) == 0x7bff && float_to_half(65520.0f) == 0x7c00, "the largest half");
  check(float_to_half(1e-8f) == 0 && float_to_half(-1e-8f) == 0x8000, "below the smallest half");
  check(float_to_half(bits_to_float(0x7f800001)) == 0x7e00, "a signalling NaN stays NaN");
}

// Between neighbours: halfway goes to the even one, a hair to either side to the nearer.
void ties_round_to_even() {
  for (int h = 0; h < 0x7bff; ++h) {
    const float middle = float((exact_half(h) + exact_half(h + 1)) / 2);
    const float below = std::nextafterf(middle, 0.0f), above = std::nextafterf(middle, INFINITY);
    const int even = h & 1 ? h + 1 : h;
    check(float_to_half(middle) == even && float_to_half(-middle) == (even | 0x8000), "tie above half %x", h);
    check(float_to_half(below) == h && float_to_half(above) == h + 1, "beside the tie above half %x", h);
  }
  for (uint32_t b = 0; b < 0x7f80; ++b) {
    check(float_to_bf16(bf16_to_float(uint16_t(b))) == b, "bfloat16 %x comes back", int(b));
    const uint32_t middle = b << 16 | 0x8000, even = b & 1 ? b + 1 : b;
    check(float_to_bf16(bits_to_float(middle)) == even, "tie above bfloat16 %x", int(b));
    check(float_to_bf16(bits_to_float(middle - 1)) == b && float_to_bf16(bits_to_float(middle + 1)) == b + 1,
          "beside the tie above bfloat16 %x", int(b));
  }
  check(float_to_bf16(bits_to_float(0x7f800001)) == 0x7fc0, "a NaN stays NaN");
}

// A matrix of one input and 65,536 outputs holds every half; times one it comes out as it is.
void every_instruction_set_reads_every_half() {
  const int64_t n = 0x10000;
  std::vector<uint16_t> weights(n);
  for (int64_t i = 0; i < n; ++i) weights[size_t(i)] = uint16_t(i);
  const float one = 1.0f;
  for (int type : {kF16, kBF16}) {
    auto packed = make_buffer<uint8_t>(n / kLanes * group_size(*type_info(type), 1));
    pack(type, n, 1, reinterpret_cast<const uint8_t*>(weights.data()), 0, n / kLanes, packed.get());
    for (const Kernels* k : tables()) {
      ActsBuffer acts(1, 1, true);
      std::vector<float> y(n);
      k->quantize(&one, 1, acts.acts, 0, 0, 1);
      k->linear(type, packed.get(), n, acts.acts, 1, 0, n / kLanes, y.data(), n);
      for (int64_t i = 0; i < n; ++i) {
        const float got = y[size_t(i)], want = type == kF16 ? half_to_float(uint16_t(i)) : bf16_to_float(uint16_t(i));
        check(want == want ? want == got : got != got, "%s reads %x of type %d as %g", k->name, int(i), type,
              double(got));
      }
    }
  }
}

// About a million float32 of both signs, from zero over denormals to infinity and NaN.
std::vector<float> all_floats() {
  std::vector<float> out;
  for (uint64_t u = 0; u < 0x100000000u; u += 4099) out.push_back(bits_to_float(uint32_t(u)));
  for (float x : {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 3.4028235e38f, -3.4028235e38f, 1e-45f, 80.0f, -80.0f, -9.5f})
    out.push_back(x);
  while (out.size() % 16) out.push_back(1.0f);
  return out;
}

void compare(const char* what, const std::vector<float>& x, const std::vector<float>& got, double (*exact)(double),
             double relative, double absolute) {
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] != x[i]) {
      check(got[i] != got[i], "%s of NaN is %g", what, double(got[i]));
      continue;
    }
    const double want = exact(double(x[i]));
    if (std::fabs(want) > 3.4028235e38) {  // or infinite
      check(float(want) == got[i], "%s(%g) is %g", what, double(x[i]), double(got[i]));
      continue;
    }
    const double error = std::fabs(double(got[i]) - want);
    check(error <= relative * std::fabs(want) + absolute, "%s(%.9g) is %.9g, expected %.9g", what, double(x[i]),
          double(got[i]), want);
    if (std::fabs(want) > 1e-30) worst = std::max(worst, error / std::fabs(want));
  }
  std::printf("%s: largest relative error %.3g\n", what, worst);
}

double capped_exp(double x) { return x < -86.5 ? 0.0 : std::exp(std::min(x, 80.0)); }
double exact_silu(double x) { return std::isinf(x) && x < 0 ? 0.0 : x / (1 + std::exp(-x)); }
double exact_gelu(double x) {  // the tanh form, without its cancellation
  if (std::isinf(x)) return x < 0 ? 0.0 : x;
  return x / (1 + std::exp(-2 * 0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

void functions_are_accurate_everywhere() {
  const std::vector<float> x = all_floats(), ones(x.size(), 1.0f);
  std::vector<float> y(x.size());
  for (size_t i = 0; i < x.size(); i += 16) probe::store(&y[i], probe::exp(probe::load(&x[i])));
  compare("exp", x, y, capped_exp, 3e-7, 0);
  for (size_t i = 0; i < x.size(); i += 16) probe::store(&y[i], probe::tanh(probe::load(&x[i])));
  compare("tanh", x, y, [](double v) { return std::tanh(v); }, 5e-7, 1e-42);
  const Kernels& ref = *kernels_named("portable");
  std::vector<float> same[2];
  for (int act : {kSilu, kGelu}) {
    ref.gated(act, x.data(), ones.data(), int64_t(x.size()), y.data());
    // GELU's tail: the error of the exponent is as many times larger as the exponent.
    if (act == kSilu) compare("silu", x, y, exact_silu, 6e-7, 1e-30);
    if (act == kGelu) compare("gelu", x, y, exact_gelu, 2e-5, 1e-30);
    same[act] = y;
  }
  for (const Kernels* k : tables())
    for (int act : {kSilu, kGelu}) {
      k->gated(act, x.data(), ones.data(), int64_t(x.size()), y.data());
      for (size_t i = 0; i < x.size(); ++i)
        check(same[act][i] != same[act][i] ? y[i] != y[i] : std::memcmp(&y[i], &same[act][i], 4) == 0,
              "%s differs from portable: activation %d of %.9g", k->name, act, double(x[i]));
    }
}

void capping_is_the_same_everywhere() {
  const std::vector<float> x = all_floats();
  std::vector<float> want = x, got;
  kernels_named("portable")->scale_and_cap(want.data(), int64_t(want.size()), 0.5f, 30.0f);
  for (const Kernels* k : tables()) {
    got = x;
    k->scale_and_cap(got.data(), int64_t(got.size()), 0.5f, 30.0f);
    for (size_t i = 0; i < x.size(); ++i) {
      const bool same = x[i] != x[i] ? got[i] != got[i] : std::memcmp(&got[i], &want[i], 4) == 0;
      check(same, "%s caps %g", k->name, double(x[i]));
      if (x[i] == x[i]) check(std::fabs(got[i]) <= 30.0f, "%s caps %g to %g", k->name, double(x[i]), double(got[i]));
    }
  }
}

void norms_are_accurate() {
  for (const Kernels* k : tables())
    for (int n : {1, 15, 16, 17, 577, 4096})
      for (float scale : {1e-8f, 1.0f, 1e4f, 1e15f}) {
        const auto x = normal(size_t(n), scale), w = normal(size_t(n));
        std::vector<float> y(x.size());
        k->rms_norm(x.data(), w.data(), n, 1e-6f, y.data());
        double squares = 0;
        for (float v : x) squares += double(v) * double(v);
        const double factor = 1 / std::sqrt(squares / n + 1e-6);
        for (size_t i = 0; i < x.size(); ++i) {
          const double want = double(x[i]) * factor * double(w[i]);
          check(std::fabs(double(y[i]) - want) <= 2e-6 * std::fabs(want) + 1e-37, "%s rms_norm %d at %g", k->name, n,
                double(scale));
        }
      }
  for (const Kernels* k : tables()) {
    std::vector<float> zeros(33), w(33, 2.0f), y(33, 1.0f);
    k->rms_norm(zeros.data(), w.data(), 33, 0.0f + 1e-6f, y.data());
    for (float v : y) check(v == 0.0f, "%s norm of a zero row", k->name);
    zeros[5] = NAN;
    k->rms_norm(zeros.data(), w.data(), 33, 1e-6f, y.data());
    for (float v : y) check(v != v, "%s norm of a row with NaN", k->name);
  }
}

}  // namespace

int main() {
  every_half_converts();
  ties_round_to_even();
  every_instruction_set_reads_every_half();
  functions_are_accurate_everywhere();
  capping_is_the_same_everywhere();
  norms_are_accurate();
  return report("math");
}
