/* The words of the kernel text for AMD's GPUs, which HIPRTC and clang compile without headers; -ffp-contract=off. */
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
#define DEVICE __attribute__((device))
#define KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(THREADS, THREADS))) void
#define INLINE static DEVICE inline __attribute__((always_inline))
#define GLOBAL
#define TABLE static DEVICE const
#define SHARED __attribute__((shared))
#define GROUP_X __builtin_amdgcn_workgroup_id_x()
#define GROUP_Y __builtin_amdgcn_workgroup_id_y()
#define THREAD __builtin_amdgcn_workitem_id_x()
INLINE int wait_for_all() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    return 1;
}
#define WHERE /* a kernel is told where it runs */
#define PHASE for (int once = wait_for_all(); once; once = 0)
#define OWN(type, name, n) type name[n] /* of a thread, through all phases */
#define MY(name) name
typedef struct alignas(16) { uint32_t of[4]; } FOUR;
#define UNROLLED _Pragma("unroll")
#define AHEAD _Pragma("unroll 16") /* what is needed is read before it is needed */
#define AHEAD_8 _Pragma("unroll 8")
#define FMA __builtin_fmaf
#define MUL(a, b) ((a) * (b))
#define ADD(a, b) ((a) + (b))
#define DIV(a, b) ((a) / (b))
#define SQRT __builtin_sqrtf
#define INFINITY __builtin_inff()
#define NOT_A_NUMBER __builtin_nanf("")
#define REAL double
#define REAL_OF_BITS(bits) __builtin_bit_cast(double, (uint64_t)(bits))
#define BITS_OF_REAL(real) __builtin_bit_cast(uint64_t, real)
INLINE float AS_FLOAT(uint32_t bits) { return __builtin_bit_cast(float, bits); }
INLINE int AS_INT(float value) { return __builtin_bit_cast(int, value); }
INLINE int DOT4(uint32_t a, uint32_t b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(int8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i);
    return c;
}
INLINE float HALF(uint32_t bits) { return (float)__builtin_bit_cast(_Float16, (uint16_t)bits); }
