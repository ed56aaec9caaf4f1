/* The words of the kernel text in Metal's language. A kernel's arguments are numbered in their order there, and buffers
 * are bound by number and offset. Never compiled: no such machine was at hand. */
#include <metal_stdlib>
using namespace metal;
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
#define KERNEL kernel void
#define INLINE static inline
#define GLOBAL device
#define TABLE constant
#define SHARED threadgroup
#define GROUP_X group.x
#define GROUP_Y group.y
#define THREAD thread.x
#define WHERE , uint3 group [[threadgroup_position_in_grid]], uint3 thread [[thread_position_in_threadgroup]]
#define PHASE for (int once = (threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device), 1); once; once = 0)
#define OWN(type, name, n) type name[n] /* of a thread, through all phases */
#define MY(name) name
typedef struct alignas(16) { uint32_t of[4]; } FOUR;
#define UNROLLED _Pragma("unroll")
#define AHEAD _Pragma("unroll 16") /* what is needed is read before it is needed */
#define AHEAD_8 _Pragma("unroll 8")
#define FMA fma
#define MUL(a, b) ((a) * (b))
#define ADD(a, b) ((a) + (b))
#define DIV(a, b) ((a) / (b))
#define SQRT precise::sqrt
#define AS_FLOAT as_type<float>
#define AS_INT as_type<int>
#define NOT_A_NUMBER as_type<float>(0x7fc00000u)
INLINE int DOT4(uint32_t a, uint32_t b, int c) {
    const char4 x = as_type<char4>(a), y = as_type<char4>(b);
    return c + x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
}
INLINE float HALF(uint32_t bits) { return (float)as_type<half>((ushort)bits); }
