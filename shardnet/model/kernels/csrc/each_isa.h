/* Includes BODY, a file's name, once for each instruction set, with TARGET, LANES (floats of a register) and NAME. */

#define TARGET
#define LANES 4
#define NAME(x) x##_portable
#include BODY
#undef TARGET
#undef LANES
#undef NAME

#if defined(__x86_64__)
#define LANES 8
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define NAME(x) x##_avx2
#include BODY
#undef TARGET
#undef LANES
#undef NAME

#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define NAME(x) x##_avx512
#include BODY
#undef TARGET
#undef LANES
#undef NAME
#endif
