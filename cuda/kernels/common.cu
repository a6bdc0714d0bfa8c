// Declarations shared by all kernels. The sources are concatenated and compiled together, without
// headers. The sizes of the model are passed as definitions (HEAD_DIM, GROUP, PAGE_SIZE, ...). Code
// that needs PTX is excluded ON_CPU, where tests substitute it.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Hopper has separate kernels; tests define HOPPER themselves.
#if __CUDA_ARCH__ == 900
#define HOPPER
#endif

#define INFINITE __int_as_float(0x7f800000)

// The two halves of a pair of bf16.
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float wide(u16 number) { return __uint_as_float((u32)number << 16); }

#ifndef ON_CPU

// A pair of bf16, rounded to nearest.
__device__ __forceinline__ u32 pair_of(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float power_of_two(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}

// Copies 16 bytes to shared memory asynchronously, or zeros if there is no source.
__device__ __forceinline__ void copy_behind(u32 to, const void *from, bool is_there) {
    int bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most GROUPS groups of copies are in flight.
template <int GROUPS>
__device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

#endif

// Kernels of a step overlap: a kernel may start before the one before it has ended, up to the point
// where it needs that kernel's results. This call waits until the previous kernel has ended and its
// writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void launch_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// For kernels that need the previous kernel's results from the start.
__device__ __forceinline__ void follow() {
    launch_next_kernel();
    wait_for_previous_kernel();
}

__device__ __forceinline__ u16 narrow(float number) { return (u16)pair_of(number, 0.0f); }

// Rounds a number to bf16 and back.
__device__ __forceinline__ float rounded(float number) { return wide(narrow(number)); }

// Returns the sum over a block of `WARPS` warps to all threads. The order of summation is fixed, so
// the result is the same to the bit.
template <int WARPS>
__device__ __forceinline__ float block_sum(float part, float *shared) {
    for (int step = 16; step > 0; step >>= 1) part += __shfl_xor_sync(~0u, part, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = part;
    __syncthreads();
    float sum = 0.0f;
    for (int warp = 0; warp < WARPS; warp++) sum += shared[warp];
    return sum;
}

__device__ __forceinline__ u32 shared_address(const void *pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}
