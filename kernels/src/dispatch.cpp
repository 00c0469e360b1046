// Asks the CPU and the system itself: __builtin_cpu_supports needs a run-time library that Windows lacks.
#include "dispatch.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef HK_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(_WIN32)
#include <windows.h>
#endif

namespace hk {

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_amx, kernels_avx512, kernels_avxvnni, kernels_avx2;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#endif

namespace {

#if defined(__x86_64__)
struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Leaf(unsigned leaf, unsigned sub) { __get_cpuid_count(leaf, sub, &a, &b, &c, &d); }
};
bool bit(unsigned x, int i) { return x >> i & 1; }

// Does the system save these registers? Bits: 1 xmm, 2 ymm, 5 to 7 masks and zmm. (macOS shows zmm only to those who
// have used it, and so takes AVX2.)
bool saved(unsigned registers) {
  if (!bit(Leaf(1, 0).c, 27)) return false;  // OSXSAVE
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & registers) == registers;
}
bool avx2() {
  const Leaf one(1, 0), seven(7, 0);
  return saved(0x06) && bit(one.c, 12) && bit(one.c, 29) && bit(seven.b, 5);  // FMA, F16C, AVX2
}
#ifdef HK_AVXVNNI  // the compiler knows it
bool avxvnni() { return avx2() && Leaf(7, 0).a >= 1 && bit(Leaf(7, 1).a, 4); }
#endif
bool avx512() {
  const Leaf seven(7, 0);
  return avx2() && saved(0xe6) && bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31) &&
         bit(seven.c, 11);  // F, DQ, BW, VL, VNNI
}
#ifdef HK_AMX
bool amx() {
  const Leaf seven(7, 0);
  if (!avx512() || !saved(0x60000) || !bit(seven.d, 24) || !bit(seven.d, 25)) return false;  // TILE, INT8
  constexpr long kAskFor = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM: Linux hands tiles out on request
  return syscall(SYS_arch_prctl, kAskFor, kTileData) == 0;
}
#endif
#elif defined(__aarch64__)
bool dot_product() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#elif defined(_WIN32)
  return IsProcessorFeaturePresent(43);  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
#else
  return true;  // every Mac has it
#endif
}
#endif
struct Choice {
  const Kernels* table;
  bool runs;
};

const auto& choices() {  // best first; asked once, as virtual machines answer slowly
  static const Choice all[] = {
#if defined(__x86_64__)
#ifdef HK_AMX
      {&kernels_amx, amx()},
#endif
      {&kernels_avx512, avx512()},
#ifdef HK_AVXVNNI
      {&kernels_avxvnni, avxvnni()},
#endif
      {&kernels_avx2, avx2()},
#elif defined(__aarch64__)
      {&kernels_neon, dot_product()},
#endif
      {&kernels_portable, true},
  };
  return all;
}

int rows_to_fetch_from() {
#if defined(__x86_64__)
  const Leaf vendor(0, 0);
  return vendor.b == 0x756e6547 ? 1 : 4;  // "Genu"ineIntel
#else
  return 4;
#endif
}
}  // namespace

const int fetch_from_rows = rows_to_fetch_from();

const Kernels* kernels_named(const char* name) {
  for (const Choice& c : choices())
    if (std::strcmp(c.table->name, name) == 0) return c.runs ? c.table : nullptr;
  return nullptr;
}

const Kernels* kernels() {
  if (const char* name = std::getenv("HYFLASH_KERNELS_ISA")) return kernels_named(name);
  for (const Choice& c : choices())
    if (c.runs) return c.table;
  return nullptr;
}

}  // namespace hk
