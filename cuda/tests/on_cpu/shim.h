// A C++ substitute for the parts of CUDA that the model's kernels use, so that their arithmetic can
// be tested without a GPU.
//
// Clusters of blocks, usually of one, run in sequence. The threads of a cluster are fibers, which
// switch where they wait: at barriers, and at operations of all lanes of a warp. A schedule sets
// the order of threads, whether a warp runs as far as it can or all warps advance together, and
// whether asynchronous copies complete as early or as late as possible. A kernel that lacks a
// barrier reads stale data under one of the schedules. Hopper's instructions are in hopper.h.

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// Blocks run in sequence, so they can share statics. The blocks of a cluster have only barriers
// there, which are stored per block.
#define __shared__ static

struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
struct Index { unsigned x; };

namespace on_cpu {

// Dynamic shared memory of each block of a cluster.
constexpr unsigned SHARED_MAX = 256 * 1024, CLUSTER_MAX = 2;
alignas(1024) static unsigned char memory[CLUSTER_MAX][SHARED_MAX];

struct Copy { unsigned to; const void *from; bool is_there; };

struct Thread {
    Index index, block;
    unsigned rank;  // in the cluster
    bool is_made = false, has_begun = false;
    ucontext_t beginning;
    jmp_buf where;
    // Pending asynchronous copies, and the ends of their groups.
    std::vector<Copy> copies;
    std::vector<size_t> groups;
};

using Together = void (*)(void **lanes);
struct Warp {
    void *lanes[32];
    unsigned here = 0;
    Together what;
};

constexpr unsigned THREADS_MAX = 1024, STACK_BYTES = 128 * 1024;
static Thread threads[THREADS_MAX], outside, *current = &outside;
static Warp warps[THREADS_MAX / 32];
static Index block_size, grid_size;
static unsigned shared_bytes, cluster_size, at_barrier[CLUSTER_MAX], ended, ended_in[CLUSTER_MAX];
static bool is_backwards, is_hasty;
static unsigned long long powers;
// Threads that can run; each occurs at most once.
static Thread *ready[THREADS_MAX];
static unsigned ready_first, ready_count;
static void (*kernel)(void **);
static void **kernel_arguments;

inline void make_ready(Thread *thread) { ready[(ready_first + ready_count++) % THREADS_MAX] = thread; }

__attribute__((noinline)) void switch_to(Thread *to) {
    Thread *from = current;
    current = to;
    if (_setjmp(from->where)) return;
    if (to->has_begun) _longjmp(to->where, 1);
    to->has_begun = true;
    setcontext(&to->beginning);
}

// Aborts the launch. Threads keep their stacks and restart with the next launch.
static const char *failure;
[[noreturn]] inline void fail(const char *what) {
    failure = what;
    switch_to(&outside);
    abort();
}

// Hopper's part of the start and end of a cluster, and of its threads' waits.
static void begin_on_hopper();
static const char *left_on_hopper();
static bool finish_one_copy();

inline unsigned number_of(const Thread *thread) { return thread - threads; }
inline unsigned thread_count() { return cluster_size * block_size.x; }

// Runs other threads until this one is ready again.
inline void wait() {
    while (ready_count == 0)
        if (!finish_one_copy()) fail("threads wait for others that do not come");
    Thread *next = ready[ready_first];
    ready_first = (ready_first + 1) % THREADS_MAX, ready_count--;
    switch_to(next);
}

// Makes `count` threads from `first` on ready.
inline void make_all_ready(unsigned first, unsigned count) {
    for (unsigned at = 0; at < count; at++) make_ready(&threads[first + (is_backwards ? count - 1 - at : at)]);
}

// Makes the other threads of a barrier ready, once each, in front of all ready threads or behind
// them.
inline void make_others_ready(unsigned first, unsigned count) {
    for (unsigned at = 0; at < count; at++) {
        Thread *other = &threads[first + (is_backwards ? count - 1 - at : at)];
        if (other != current && is_hasty) make_ready(other);
        other = &threads[first + (is_backwards ? at : count - 1 - at)];
        if (other == current || is_hasty) continue;
        ready_first = (ready_first + THREADS_MAX - 1) % THREADS_MAX, ready_count++;
        ready[ready_first] = other;
    }
}

// Main loop of a thread: runs one kernel after the other.
static void live() {
    for (;;) {
        kernel(kernel_arguments);
        if (!current->copies.empty()) fail("a thread has ended before its copies");
        current->groups.clear();
        ended_in[current->rank]++;
        if (++ended == thread_count()) switch_to(&outside);
        else wait();
    }
}

// Waits for all lanes of the warp; the last one performs the operation on the values of all.
__attribute__((noinline)) void meet(void *mine, Together what) {
    unsigned index = number_of(current);
    Warp &warp = warps[index / 32];
    if (warp.here > 0 && warp.what != what) fail("lanes of a warp do different things");
    warp.what = what, warp.lanes[index % 32] = mine;
    if (++warp.here < 32) return wait();
    warp.here = 0;
    what(warp.lanes);
    make_others_ready(index / 32 * 32, 32);
}

__attribute__((noinline)) void barrier() {
    unsigned rank = current->rank;
    if (++at_barrier[rank] == block_size.x) {
        at_barrier[rank] = 0;
        make_all_ready(rank * block_size.x, block_size.x);
    }
    wait();
}

inline unsigned char *own_memory() { return memory[current->rank]; }
inline unsigned char *shared(unsigned address, unsigned bytes) {
    if (address % bytes != 0 || address + bytes > shared_bytes) fail("an address outside of shared memory");
    return memory[current->rank] + address;
}

inline void finish(const Copy &copy) {
    if (copy.is_there) memcpy(shared(copy.to, 16), copy.from, 16);
    else memset(shared(copy.to, 16), 0, 16);
}

template <typename Value>
struct Passed { Value value, result; int by; };

// Gives each lane the value of the lane that `FROM` returns, or its own if there is none.
template <int (*FROM)(int, int), typename Value>
Value pass(Value value, int by) {
    Passed<Value> passed = {value, value, by};
    meet(&passed, [](void **lanes) {
        for (int lane = 0; lane < 32; lane++) {
            auto *to = (Passed<Value> *)lanes[lane];
            int from = FROM(lane, to->by);
            if (from >= 0 && from < 32) to->result = ((Passed<Value> *)lanes[from])->value;
        }
    });
    return passed.result;
}
inline int crosswise(int lane, int by) { return lane ^ by; }
inline int below(int lane, int by) { return lane - by; }
inline int from_one(int, int by) { return by; }

// Loads four matrices of eight rows of eight numbers: each lane has the address of a row, and gets
// two numbers of each.
struct Loaded { unsigned *to, address; };
template <bool IS_TURNED>
void load(void **lanes) {
    for (int matrix = 0; matrix < 4; matrix++) {
        uint16_t rows[8][8];
        for (int row = 0; row < 8; row++)
            memcpy(rows[row], shared(((Loaded *)lanes[matrix * 8 + row])->address, 16), 16);
        for (int lane = 0; lane < 32; lane++) {
            int row = lane / 4, column = lane % 4 * 2;
            unsigned first = IS_TURNED ? rows[column][row] : rows[row][column];
            unsigned second = IS_TURNED ? rows[column + 1][row] : rows[row][column + 1];
            ((Loaded *)lanes[lane])->to[matrix] = first | second << 16;
        }
    }
}

// The product of 16 x 16 and 16 x 8 numbers, added to 16 x 8 sums.
struct Factors { float *sums; const unsigned *a; unsigned b[2]; };
inline void number_pair(unsigned pair, float *first, float *second) {
    unsigned bits[2] = {pair << 16, pair & 0xffff0000u};
    memcpy(first, &bits[0], 4), memcpy(second, &bits[1], 4);
}
inline void product(void **lanes) {
    float a[16][16], b[16][8], sums[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const Factors &from = *(Factors *)lanes[lane];
        int quad = lane / 4, column = lane % 4 * 2;
        for (int at = 0; at < 4; at++) {
            float *to = &a[quad + at % 2 * 8][column + at / 2 * 8];
            number_pair(from.a[at], to, to + 1);
            sums[quad + at / 2 * 8][column + at % 2] = from.sums[at];
        }
        for (int half = 0; half < 2; half++)
            number_pair(from.b[half], &b[column + half * 8][quad], &b[column + half * 8 + 1][quad]);
    }
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++) sums[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < 32; lane++)
        for (int at = 0; at < 4; at++)
            ((Factors *)lanes[lane])->sums[at] = sums[lane / 4 + at / 2 * 8][lane % 4 * 2 + at % 2];
}

// Launch parameters, as passed by the test.
struct Launch { unsigned blocks, threads, shared_bytes, cluster, is_backwards, is_hasty; };
// Runs a kernel, and returns an error message or null.
inline const char *run(const Launch &launch, void (*what)(void **), void **arguments) {
    block_size = {launch.threads}, grid_size = {launch.blocks}, cluster_size = launch.cluster;
    if (thread_count() > THREADS_MAX || cluster_size > CLUSTER_MAX || launch.shared_bytes > SHARED_MAX)
        return "a block is too large";
    kernel = what, kernel_arguments = arguments, shared_bytes = launch.shared_bytes;
    is_backwards = launch.is_backwards, is_hasty = launch.is_hasty;
    outside.has_begun = true, current = &outside;
    for (Warp &warp : warps) warp.here = 0;
    for (Thread &thread : threads) thread.is_made &= !failure;
    for (unsigned &here : at_barrier) here = 0;
    ready_count = 0;
    for (unsigned at = 0; at < thread_count(); at++) {
        Thread &thread = threads[at];
        thread.index = {at % launch.threads}, thread.rank = at / launch.threads;
        if (thread.is_made) continue;
        thread.is_made = true, thread.has_begun = false;
        thread.copies.clear(), thread.groups.clear();
        void *stack = thread.beginning.uc_stack.ss_sp;
        getcontext(&thread.beginning);
        thread.beginning.uc_stack.ss_sp = stack ? stack : malloc(STACK_BYTES);
        thread.beginning.uc_stack.ss_size = STACK_BYTES;
        makecontext(&thread.beginning, live, 0);
    }
    failure = nullptr, powers = 0;
    for (unsigned done = 0; done < launch.blocks; done += cluster_size) {
        unsigned first = launch.is_backwards ? launch.blocks - cluster_size - done : done;
        for (unsigned at = 0; at < thread_count(); at++) threads[at].block = {first + threads[at].rank};
        // Unwritten memory is NaN.
        memset(memory, 0xff, sizeof(memory[0]) * cluster_size);
        begin_on_hopper();
        ended = ended_in[0] = ended_in[1] = 0;
        make_all_ready(0, thread_count());
        wait();
        if (failure) return failure;
        bool is_at_barrier = at_barrier[0] > 0 || at_barrier[1] > 0;
        if (ready_count > 0 || is_at_barrier) return failure = "a block has ended before its threads";
        if (const char *left = left_on_hopper()) return failure = left;
        for (unsigned rank = 0; rank < cluster_size; rank++)
            for (unsigned at = shared_bytes; at < SHARED_MAX; at++)
                if (memory[rank][at] != 0xff) return failure = "a block has written behind its shared memory";
    }
    return nullptr;
}

template <auto KERNEL, typename... Arguments, size_t... AT>
void call(void (*)(Arguments...), void **arguments, std::index_sequence<AT...>) {
    KERNEL(*(Arguments *)arguments[AT]...);
}
template <typename... Arguments>
constexpr auto indices(void (*)(Arguments...)) { return std::index_sequence_for<Arguments...>(); }

}  // namespace on_cpu

// The number of the omitted statement, in kernels compiled with omittable statements.
namespace on_cpu { static unsigned omitted; }
extern "C" void omit(unsigned statement) { on_cpu::omitted = statement; }

// Defines the launch function of a kernel: its arguments are pointers to the kernel's arguments, as
// in the driver.
#define LAUNCHABLE(name)                                                                             \
    extern "C" const char *launch_##name(const on_cpu::Launch *launch, void **arguments) {            \
        auto kernel = [](void **all) { on_cpu::call<name>(name, all, on_cpu::indices(name)); };       \
        return on_cpu::run(*launch, kernel, arguments);                                              \
    }

#define threadIdx (on_cpu::current->index)
#define blockIdx (on_cpu::current->block)
#define blockDim on_cpu::block_size
#define gridDim on_cpu::grid_size

inline void __syncthreads() { on_cpu::barrier(); }
inline void __syncwarp() { on_cpu::meet(nullptr, [](void **) {}); }
template <typename Value>
Value __shfl_xor_sync(unsigned, Value value, int by) { return on_cpu::pass<on_cpu::crosswise>(value, by); }
template <typename Value>
Value __shfl_up_sync(unsigned, Value value, int by) { return on_cpu::pass<on_cpu::below>(value, by); }
template <typename Value>
Value __shfl_sync(unsigned, Value value, int lane) { return on_cpu::pass<on_cpu::from_one>(value, lane); }
inline unsigned __ballot_sync(unsigned, bool mine) {
    on_cpu::Passed<unsigned> passed = {mine, 0, 0};
    on_cpu::meet(&passed, [](void **lanes) {
        unsigned all = 0;
        for (int lane = 0; lane < 32; lane++) all |= ((on_cpu::Passed<unsigned> *)lanes[lane])->value << lane;
        for (int lane = 0; lane < 32; lane++) ((on_cpu::Passed<unsigned> *)lanes[lane])->result = all;
    });
    return passed.result;
}
inline bool __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
inline int __ffs(unsigned bits) { return __builtin_ffs((int)bits); }

// Threads switch only where they wait, so operations in between are atomic.
template <typename Value>
Value atomicAdd(Value *at, Value more) { return std::exchange(*at, *at + more); }
template <typename Value>
Value atomicMax(Value *at, Value other) { return std::exchange(*at, *at < other ? other : *at); }

template <typename To, typename From>
To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}
inline float __int_as_float(int bits) { return bits_as<float>(bits); }
inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline unsigned __float_as_uint(float number) { return bits_as<unsigned>(number); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float rsqrtf(float number) { return 1.0f / sqrtf(number); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
// Called for every score; a library call is slow.
inline float highest_of_two(float a, float b) { return a > b || b != b ? a : b; }
#define fmaxf highest_of_two
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
// Statics have other addresses, which identify barriers.
inline size_t __cvta_generic_to_shared(const void *pointer) {
    size_t address = (const unsigned char *)pointer - on_cpu::memory[on_cpu::current->rank];
    if (address < on_cpu::SHARED_MAX) return address;
    return (const unsigned char *)pointer - on_cpu::memory[0];
}

// Operations that kernels express in PTX.

inline unsigned bf16_of(float number) {
    unsigned bits = __float_as_uint(number);
    if (number != number) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned pair_of(float low, float high) { return bf16_of(low) | bf16_of(high) << 16; }

// Number of powers computed by a launch: a measure of its work.
extern "C" unsigned long long powers_taken() { return on_cpu::powers; }
inline float power_of_two(float exponent) {
    on_cpu::powers++;
    float power = exp2f(exponent);
    return power < 1.17549435e-38f ? 0.0f : power;
}

inline void copy_behind(unsigned to, const void *from, bool is_there) {
    on_cpu::Copy copy = {to, from, is_there};
    if (on_cpu::is_hasty) on_cpu::finish(copy);
    else on_cpu::current->copies.push_back(copy);
}
inline void end_group() { on_cpu::current->groups.push_back(on_cpu::current->copies.size()); }
template <int GROUPS>
void wait_for_groups() {
    std::vector<on_cpu::Copy> &copies = on_cpu::current->copies;
    std::vector<size_t> &groups = on_cpu::current->groups;
    if (groups.size() <= GROUPS) return;
    size_t done = groups.size() - GROUPS, end = groups[done - 1];
    for (size_t at = 0; at < end; at++) on_cpu::finish(copies[at]);
    copies.erase(copies.begin(), copies.begin() + end);
    groups.erase(groups.begin(), groups.begin() + done);
    for (size_t &group : groups) group -= end;
}

inline void load_four(unsigned *to, unsigned address) {
    on_cpu::Loaded loaded = {to, address};
    on_cpu::meet(&loaded, on_cpu::load<false>);
}
inline void load_four_turned(unsigned *to, unsigned address) {
    on_cpu::Loaded loaded = {to, address};
    on_cpu::meet(&loaded, on_cpu::load<true>);
}
inline void multiply(float *sums, const unsigned *a, unsigned b0, unsigned b1) {
    on_cpu::Factors factors = {sums, a, {b0, b1}};
    on_cpu::meet(&factors, on_cpu::product);
}
inline void put_shared(unsigned address, unsigned value) { memcpy(on_cpu::shared(address, 4), &value, 4); }

#include "hopper.h"
