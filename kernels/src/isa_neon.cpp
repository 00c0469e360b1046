#define HK_ISA neon
#define HK_NAME "neon"
#define HK_TABLE kernels_neon
#include "vec_neon.h"

#include "isa.inl"
