// Attention to a model's caches for those outside of its forwards; see the C interface.
#pragma once
#include "layers.h"
#include "model.h"

namespace hk {

void kv_attend(Workers& w, const Kernels& k, const Model& model, const hk_kv_attention& a);  // throws std::bad_alloc

}  // namespace hk
