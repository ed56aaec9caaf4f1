/* The words of the kernel text in OpenCL C 1.2. */
typedef uint uint32_t;
typedef ulong uint64_t;
typedef uchar uint8_t;
typedef char int8_t;
typedef short int16_t;
typedef ushort uint16_t;
#pragma OPENCL FP_CONTRACT OFF
#define KERNEL __kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) void
#define INLINE static inline
#define GLOBAL __global
#define TABLE __constant
#define SHARED __local
#define GROUP_X ((uint32_t)get_group_id(0))
#define GROUP_Y ((uint32_t)get_group_id(1))
#define THREAD ((uint32_t)get_local_id(0))
#define WHERE /* a kernel is told where it runs */
#define PHASE for (int once = (barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE), 1); once; once = 0)
#define OWN(type, name, n) type name[n] /* of a thread, through all phases */
#define MY(name) name
typedef struct __attribute__((aligned(16))) { uint32_t of[4]; } FOUR;
#define UNROLLED _Pragma("unroll")
#define AHEAD _Pragma("unroll 16") /* what is needed is read before it is needed */
#define AHEAD_8 _Pragma("unroll 8")
#define FMA fma
#define MUL(a, b) ((a) * (b))
#define ADD(a, b) ((a) + (b))
#define DIV(a, b) ((a) / (b))
#define SQRT sqrt
#define AS_FLOAT as_float
#define AS_INT as_int
#define NOT_A_NUMBER as_float(0x7fc00000u)
#ifdef cl_khr_fp64
#define REAL double
#define REAL_OF_BITS(bits) as_double((uint64_t)(bits))
#define BITS_OF_REAL(real) as_ulong(real)
#endif
INLINE int DOT4(uint32_t a, uint32_t b, int c) {
    const char4 x = as_char4(a), y = as_char4(b);
    return c + x.s0 * y.s0 + x.s1 * y.s1 + x.s2 * y.s2 + x.s3 * y.s3;
}
/* vload_half needs no extension; the bits are in memory of the thread's own. */
INLINE float HALF(uint32_t bits) {
    const ushort one = (ushort)bits;
    return vload_half(0, (const half *)&one);
}
