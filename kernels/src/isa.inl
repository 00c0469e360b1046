// One translation unit per instruction set: defines HK_ISA and its names, includes its vector header, then this.
#include <cmath>
#include <utility>

#include "half.h"
#include "kernels.h"

#include "rows.inl"

#include "linear.inl"

#include "attention.inl"

#include "draft.inl"

#include "bench.inl"

namespace hk {
extern const Kernels HK_TABLE;
const Kernels HK_TABLE = {HK_NAME,
                          HK_ISA::quantize,
                          HK_ISA::linear,
                          HK_ISA::gated,
                          HK_ISA::rms_norm,
                          HK_ISA::rotate,
                          HK_ISA::scale_and_cap,
                          HK_ISA::top,
                          HK_ISA::sum_exp,
                          HK_ISA::append_kv,
                          HK_ISA::attend_split,
                          HK_ISA::merge_split,
                          HK_ISA::finish_attention,
                          HK_ISA::memory_write,
                          HK_ISA::memory_read,
                          HK_ISA::dots,
                          HK_ISA::gru_step,
                          HK_ISA::exercise};
}  // namespace hk
