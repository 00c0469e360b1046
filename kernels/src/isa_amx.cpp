#define HK_ISA amx
#define HK_NAME "amx"
#define HK_TABLE kernels_amx
#define HK_TILES
#include <new>

#include "vec_avx512.h"

#include "isa.inl"
