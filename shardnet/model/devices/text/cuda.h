/* The words of the kernel text in CUDA C++, which NVRTC compiles without headers; --fmad=false keeps sums as written. */
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
/* Two groups at a time: with more a thread has few registers, and waits for each word that it reads. */
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 2)
#define INLINE static __device__ __forceinline__
#define GLOBAL
#define TABLE __constant__
#define SHARED __shared__
#define GROUP_X blockIdx.x
#define GROUP_Y blockIdx.y
#define THREAD threadIdx.x
#define WHERE /* a kernel is told where it runs */
#define PHASE for (int once = (__syncthreads(), 1); once; once = 0)
#define OWN(type, name, n) type name[n] /* of a thread, through all phases */
#define MY(name) name
typedef struct alignas(16) { uint32_t of[4]; } FOUR;
#define UNROLLED _Pragma("unroll")
#define AHEAD _Pragma("unroll 16") /* what is needed is read before it is needed */
#define AHEAD_8 _Pragma("unroll 8")
#define BYTES_OF __byte_perm
#define FMA __fmaf_rn
#define MUL __fmul_rn
#define ADD __fadd_rn
#define DIV __fdiv_rn
#define SQRT __fsqrt_rn
#define AS_FLOAT __uint_as_float
#define AS_INT __float_as_int
#define INFINITY __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)
#define REAL double
#define REAL_OF_BITS(bits) __longlong_as_double((long long)(bits))
#define BITS_OF_REAL(real) ((uint64_t)__double_as_longlong(real))
INLINE int DOT4(uint32_t a, uint32_t b, int c) { return __dp4a((int)a, (int)b, c); } /* from sm_61 on */
INLINE float HALF(uint32_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}

/* The sums of two words of 16 bits, signed, each times a byte, without a sign; from sm_61 on. */
INLINE int DOT2(uint32_t words, uint32_t bytes, int c) {
    asm("dp2a.lo.s32.u32 %0, %1, %2, %0;" : "+r"(c) : "r"(words), "r"(bytes));
    return c;
}
#define DOT2 DOT2

/* From sm_90 on a kernel begins before the one before has ended, of which it may read and write nothing until then. The next
 * may begin as soon as this one need not wait. */
#if __CUDA_ARCH__ >= 900
#define AWAIT asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#endif

/* From sm_80 on a warp multiplies bytes of 32 outputs and 16 rows by tensor cores: sums of whole numbers, as DOT4's. `weights`
 * and `rows` are [16 inputs][PLANE], and a thread gets the sums of its own outputs and rows (many.h). */
#if __CUDA_ARCH__ >= 800
#define TENSORS
#define MULTIPLY_TILES(weights, rows, dots)                                                                           \
    TIMES (part, 4) { /* of 16 outputs and 8 rows */                                                                  \
        const FOUR *w = (weights) + PLACE(part % 2 * 2), *x = (rows) + FIRST_ROW + part / 2 * 8 + THREAD % 32 / 4;    \
        int *d = (dots) + part / 2 * 8 + part % 2 * 2;                                                                \
        const uint32_t t = THREAD % 4;                                                                                \
        if (SUB == 32)                                                                                                \
            asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};" \
                : "=r"(d[0]), "=r"(d[4]), "=r"(d[1]), "=r"(d[5])                                                      \
                : "r"(w[0].of[t]), "r"(w[8].of[t]), "r"(w[PLANE].of[t]), "r"(w[PLANE + 8].of[t]), "r"(x[0].of[t]),    \
                  "r"(x[PLANE].of[t]), "r"(0));                                                                       \
        else                                                                                                          \
            asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"        \
                : "=r"(d[0]), "=r"(d[4]), "=r"(d[1]), "=r"(d[5])                                                      \
                : "r"(w[0].of[t]), "r"(w[8].of[t]), "r"(x[0].of[t]), "r"(0));                                         \
    }
#endif
