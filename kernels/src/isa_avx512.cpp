#define HK_ISA avx512
#define HK_NAME "avx512"
#define HK_TABLE kernels_avx512
#include "vec_avx512.h"

#include "isa.inl"
