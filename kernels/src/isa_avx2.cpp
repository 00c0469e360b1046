#define HK_ISA avx2
#define HK_NAME "avx2"
#define HK_TABLE kernels_avx2
#include "vec_avx2.h"

#include "isa.inl"
