// Which instruction set this process uses.
#pragma once
#include "kernels.h"

namespace hk {

// The best table of this CPU, or the one that HYFLASH_KERNELS_ISA names; nullptr when the name is unknown or the CPU
// cannot run it.
const Kernels* kernels();

// The table by name, if built in and runnable here; nullptr otherwise.
const Kernels* kernels_named(const char* name);

}  // namespace hk
