#define HK_ISA portable
#define HK_NAME "portable"
#define HK_TABLE kernels_portable
#include "vec_portable.h"

#include "isa.inl"
