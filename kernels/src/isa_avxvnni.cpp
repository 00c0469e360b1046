#define HK_ISA avxvnni
#define HK_NAME "avxvnni"
#define HK_TABLE kernels_avxvnni
#define HK_AVXVNNI
#include "vec_avx2.h"

#include "isa.inl"
