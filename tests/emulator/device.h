// The primitives of backends/cuda/device.h on a CPU: every CUDA thread is a fiber, and a barrier, a
// shuffle or a tensor-core product is a point where fibers wait for each other. What hardware
// leaves undefined is made to fail: shared memory is initialised to NaN, and in every second launch
// to large numbers; an asynchronous copy takes effect only when it is waited for; writes past the
// shared memory are detected, and a deadlock ends the launch.
#pragma once

#include <csetjmp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct alignas(16) Four { u32 x, y, z, w; };

#define FN static inline
#define UNROLL
#define ROLLED
#define KERNEL(name, Params, threads) extern "C" void name(const Params& p)

namespace emulator {

enum Outcome { FINE = 0, STUCK = 1, OVERRUN = 2, MISALIGNED = 3, ALONE = 4 };

struct Gate {
    int expected = 0, arrived = 0;
    u64 generation = 0;
    void settle() { if (expected > 0 && arrived == expected) { arrived = 0; ++generation; } }
};

struct Warp {
    Gate gate;
    u64 slot[32];
    u32 a[32][4], b[32][2];
    const u8* row[32];
};

struct Block {
    u8* shared = nullptr;
    int x = 0, y = 0, z = 0, rank = 0;
    Gate gate;
    std::vector<Warp> warps;
};

struct Copy { u8* to; const u8* from; bool wanted; };

struct Fiber {
    ucontext_t begin;
    jmp_buf here;
    int thread = 0;
    Block* block = nullptr;
    bool started = false, done = false;
    const Gate* waits_for = nullptr;
    u64 seen = 0, cluster_seen = 0;
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
};

const size_t STACK = 128 << 10, GUARD = 4096;
static Fiber* now;
static jmp_buf scheduler;
static std::vector<Block> blocks;
static Gate cluster_gate;
static int size_x, cluster_blocks;
static int outcome;
static void (*entry)(const void*);
static const void* params;

static void leave_to_scheduler() { if (!_setjmp(now->here)) _longjmp(scheduler, 1); }

static void wait_until_past(const Gate& gate, u64 seen) {
    while (gate.generation == seen) {
        now->waits_for = &gate;
        now->seen = seen;
        leave_to_scheduler();
    }
    now->waits_for = nullptr;
}

static u64 arrive(Gate& gate) {
    const u64 seen = gate.generation;
    ++gate.arrived;
    gate.settle();
    return seen;
}

static void arrive_and_wait(Gate& gate) { wait_until_past(gate, arrive(gate)); }

static Warp& current_warp() { return now->block->warps[now->thread / 32]; }

static void run() {
    entry(params);
    now->done = true;
    for (Gate* gate : {&now->block->gate, &cluster_gate, &current_warp().gate}) { --gate->expected; gate->settle(); }
    _longjmp(scheduler, 1);
}

static void fail(int why) {
    outcome = why;
    now->done = true;
    _longjmp(scheduler, 2);
}

static void check_aligned(const void* place) { if ((size_t)place & 15) fail(MISALIGNED); }

static bool run_cluster(std::vector<Fiber>& fibers) {
    for (size_t left = fibers.size(), round = 0; left; ++round) {
        bool moved = false;
        for (size_t n = 0; n < fibers.size(); ++n) {
            Fiber& fiber = fibers[round & 1 ? fibers.size() - 1 - n : n];
            if (fiber.done || (fiber.waits_for && fiber.waits_for->generation == fiber.seen)) continue;
            moved = true;
            now = &fiber;
            const int jump = _setjmp(scheduler);
            if (!jump) {
                if (fiber.started) _longjmp(fiber.here, 1);
                fiber.started = true;
                setcontext(&fiber.begin);
            }
            if (jump == 2) return false;
            if (now->done) --left;
        }
        if (!moved) { outcome = STUCK; return false; }
    }
    return true;
}

}  // namespace emulator

extern "C" int lz_emulate(void (*kernel)(const void*), int x, int y, int z, int threads, int shared_bytes, int cluster,
                          const void* given) {
    using namespace emulator;
    static std::mutex launch_mutex;                // one launch at a time
    const std::lock_guard<std::mutex> lock(launch_mutex);
    size_x = x; cluster_blocks = cluster;
    entry = kernel; params = given; outcome = FINE;
    static int launches = 0;
    const int stale_byte = launches++ % 2 ? 0x47 : 0xFF;
    const int many = cluster * threads;
    const size_t shared_size = ((shared_bytes + 127) / 128) * 128;
    u8* stacks = (u8*)mmap(nullptr, many * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                           -1, 0);
    std::vector<Fiber> fibers(many);
    blocks.assign(cluster, Block());
    for (Block& block : blocks) block.shared = (u8*)aligned_alloc(128, shared_size + GUARD);
    for (int at = 0; at < x * y * z && outcome == FINE; at += cluster) {
        cluster_gate = Gate();
        cluster_gate.expected = many;
        for (int rank = 0; rank < cluster; ++rank) {
            Block& block = blocks[rank];
            const int index = at + rank;
            block.x = index % x; block.y = index / x % y; block.z = index / (x * y); block.rank = rank;
            block.gate = Gate();
            block.gate.expected = threads;
            block.warps.assign((threads + 31) / 32, Warp());
            memset(block.shared, stale_byte, shared_size);
            memset(block.shared + shared_size, 0xFF, GUARD);
            for (int t = 0; t < threads; ++t) {
                Fiber& fiber = fibers[rank * threads + t];
                fiber = Fiber();
                fiber.thread = t;
                fiber.block = &block;
                ++block.warps[t / 32].gate.expected;
                getcontext(&fiber.begin);
                fiber.begin.uc_stack.ss_sp = stacks + (rank * threads + t) * STACK;
                fiber.begin.uc_stack.ss_size = STACK;
                fiber.begin.uc_link = nullptr;
                makecontext(&fiber.begin, run, 0);
            }
        }
        if (!run_cluster(fibers)) break;
        for (Block& block : blocks)
            for (size_t n = 0; n < GUARD; ++n)
                if (block.shared[shared_size + n] != 0xFF) outcome = OVERRUN;
    }
    for (Block& block : blocks) free(block.shared);
    munmap(stacks, many * STACK);
    return outcome;
}

// Has the signature of cuLaunchKernelEx. 1: CUDA_ERROR_INVALID_VALUE; 719:
// CUDA_ERROR_LAUNCH_FAILED.
namespace emulator {

struct LaunchConfig {
    u32 grid[3], block[3], shared;
    void* stream;
    const u32* attributes;                         // of 18 words: the id, nothing, then the value
    u32 attribute_count;
};

}  // namespace emulator

extern "C" int lz_launch(const emulator::LaunchConfig* config, void (*kernel)(const void*), void** given, void** extra) {
    int cluster = 1;
    for (u32 n = 0; n < config->attribute_count; ++n)
        if (config->attributes[18 * n] == 4) cluster = config->attributes[18 * n + 2];
    if (extra || config->grid[1] > 65535 || config->grid[2] > 65535 || config->grid[0] % cluster) return 1;
    return lz_emulate(kernel, config->grid[0], config->grid[1], config->grid[2], config->block[0], config->shared, cluster,
                      given[0]) ? 719 : 0;
}

// Indices

FN int thread() { return emulator::now->thread; }
FN int lane() { return emulator::now->thread & 31; }
FN int warp() { return emulator::now->thread >> 5; }
FN int block_x() { return emulator::now->block->x; }
FN int block_y() { return emulator::now->block->y; }
FN int block_z() { return emulator::now->block->z; }
FN int grid_x() { return emulator::size_x; }
FN u8* shared() { return emulator::now->block->shared; }

// Bits

FN void launch_next() {}
FN void wait_for_previous() {}
FN u32 float_bits(float v) { u32 r; memcpy(&r, &v, 4); return r; }
FN float bits_float(u32 v) { float r; memcpy(&r, &v, 4); return r; }

template <bool IS_BF16> FN float to_float(u16 v) {
    if (IS_BF16) return bits_float(u32(v) << 16);
    const u32 sign = u32(v & 0x8000) << 16, exponent = (v >> 10) & 31, fraction = v & 1023;
    if (exponent == 31) return bits_float(sign | 0x7F800000 | (fraction << 13));
    if (exponent) return bits_float(sign | ((exponent + 112) << 23) | (fraction << 13));
    const float small = ldexpf(float(fraction), -24);
    return sign ? -small : small;
}

template <bool IS_BF16> FN u16 from_float(float v) {
    const u32 bits = float_bits(v);
    if (v != v) return 0x7FFF;
    if (IS_BF16) return u16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    const u16 sign = u16((bits >> 16) & 0x8000);
    const float size = fabsf(v);
    if (size >= 65520.0f) return sign | 0x7C00;
    if (size < 6.103515625e-05f) return sign | u16(nearbyintf(ldexpf(size, 24)));
    const u32 b = float_bits(size);
    return sign | u16((b + 0xFFF + ((b >> 13) & 1) - (112u << 23)) >> 13);
}

template <bool IS_BF16> FN u32 pack2(float low, float high) {
    return u32(from_float<IS_BF16>(low)) | u32(from_float<IS_BF16>(high)) << 16;
}

// Threads of a warp and of a block

FN void sync_block() { emulator::arrive_and_wait(emulator::now->block->gate); }
FN void sync_warp() { emulator::arrive_and_wait(emulator::current_warp().gate); }

template <typename T> FN T shuffle(T v, int from) {
    emulator::Warp& warp = emulator::current_warp();
    memcpy(&warp.slot[lane()], &v, sizeof v);
    sync_warp();
    T got;
    memcpy(&got, &warp.slot[from & 31], sizeof got);
    sync_warp();
    return got;
}

template <typename T> FN T shuffle_xor(T v, int mask) { return shuffle(v, lane() ^ mask); }

FN int lowest_bit(u32 v) { return __builtin_ctz(v); }

FN u32 ballot(bool v) {
    emulator::Warp& warp = emulator::current_warp();
    warp.slot[lane()] = v;
    sync_warp();
    u32 all = 0;
    for (int n = 0; n < 32; ++n) all |= u32(warp.slot[n] & 1) << n;
    sync_warp();
    return all;
}

template <typename T> FN T warp_sum(T v) {
    for (int mask = 16; mask; mask >>= 1) v += shuffle_xor(v, mask);
    return v;
}

template <typename T> FN T warp_max(T v) {
    for (int mask = 16; mask; mask >>= 1) {
        const T other = shuffle_xor(v, mask);
        v = other > v ? other : v;
    }
    return v;
}

// Memory

FN Four load4(const void* from) { emulator::check_aligned(from); Four v; memcpy(&v, from, 16); return v; }
FN Four load4_once(const void* from) { return load4(from); }
FN Four load4_if(const void* from, bool wanted) { return wanted ? load4(from) : Four{0, 0, 0, 0}; }
FN void store4(void* to, Four v) { emulator::check_aligned(to); memcpy(to, &v, 16); }

FN void copy_async(void* place, const void* from, bool wanted) {
    emulator::check_aligned(place);
    if (wanted) emulator::check_aligned(from);
    memset(place, 0xFF, 16);
    emulator::now->open.push_back({(u8*)place, (const u8*)from, wanted});
}

FN void copy_commit() {
    emulator::now->groups.push_back(emulator::now->open);
    emulator::now->open.clear();
}

template <int N> FN void copy_wait() {
    auto& groups = emulator::now->groups;
    while (groups.size() > size_t(N)) {
        for (const emulator::Copy& copy : groups.front()) {
            if (copy.wanted) memcpy(copy.to, copy.from, 16); else memset(copy.to, 0, 16);
        }
        groups.erase(groups.begin());
    }
}

template <typename T> FN T atomic_add(T* place, T v) { const T before = *place; *place = before + v; return before; }

// Tensor cores

template <bool IS_BF16> FN void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    emulator::Warp& warp = emulator::current_warp();
    memcpy(warp.a[lane()], a, sizeof a);
    memcpy(warp.b[lane()], b, sizeof b);
    sync_warp();
    const int g = lane() / 4, t = lane() % 4;
    for (int out = 0; out < 4; ++out) {
        const int row = g + (out >= 2 ? 8 : 0), column = 2 * t + (out & 1);
        for (int k = 0; k < 16; ++k) {
            const int half = k & 1, quad = (k % 8) / 2, upper = k >= 8;
            const u32 left = warp.a[(row % 8) * 4 + quad][(row >= 8 ? 1 : 0) + (upper ? 2 : 0)];
            const u32 right = warp.b[column * 4 + quad][upper];
            d[out] += to_float<IS_BF16>(u16(left >> (16 * half))) * to_float<IS_BF16>(u16(right >> (16 * half)));
        }
    }
    sync_warp();
}

template <bool TRANSPOSED> FN void load_matrices(u32 (&r)[4], const void* row) {
    emulator::check_aligned(row);
    emulator::Warp& warp = emulator::current_warp();
    warp.row[lane()] = (const u8*)row;
    sync_warp();
    const int g = lane() / 4, t = lane() % 4;
    for (int n = 0; n < 4; ++n) {
        u16 pair[2];
        for (int half = 0; half < 2; ++half) {
            const int down = TRANSPOSED ? 2 * t + half : g, across = TRANSPOSED ? g : 2 * t + half;
            memcpy(&pair[half], warp.row[n * 8 + down] + across * 2, 2);
        }
        r[n] = u32(pair[0]) | u32(pair[1]) << 16;
    }
    sync_warp();
}

FN void ldmatrix4(u32 (&r)[4], const void* row) { load_matrices<false>(r, row); }
FN void ldmatrix4_transposed(u32 (&r)[4], const void* row) { load_matrices<true>(r, row); }

FN u32 transpose_8x8(u32 v) {
    const int g = lane() / 4, t = lane() % 4, half = 16 * (g % 2);
    const u32 low = shuffle(v, 8 * t + g / 2), high = shuffle(v, 8 * t + 4 + g / 2);
    return (low >> half & 0xFFFF) | (high >> half & 0xFFFF) << 16;
}

// Powers

FN float fast_exp2(float v) { return exp2f(v); }
FN float fast_log2(float v) { return log2f(v); }
FN float reciprocal(float v) { return 1.0f / v; }
FN float exact_exp(float v) { return expf(v); }
FN float rsqrtf(float v) { return 1.0f / sqrtf(v); }

// Clusters

FN int cluster_size() { return emulator::cluster_blocks; }
FN int cluster_rank() { return emulator::now->block->rank; }
FN void cluster_arrive() { emulator::now->cluster_seen = emulator::arrive(emulator::cluster_gate); }
FN void cluster_wait() { emulator::wait_until_past(emulator::cluster_gate, emulator::now->cluster_seen); }
FN void sync_cluster() { cluster_arrive(); cluster_wait(); }
FN void leave_cluster() { sync_cluster(); }

template <typename T> FN T* of_rank(const T* here, int rank) {
    return (T*)(emulator::blocks[rank].shared + ((const u8*)here - shared()));
}

template <typename T> FN T cluster_read(const T* here, int rank) { return *of_rank(here, rank); }
template <typename T> FN void cluster_write(T* here, int rank, T value) { *of_rank(here, rank) = value; }

// Integers

FN void mma_u8_s8(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const u32 (&c)[4]) {
    emulator::Warp& warp = emulator::current_warp();
    memcpy(warp.a[lane()], a, sizeof a);
    warp.b[lane()][0] = b0, warp.b[lane()][1] = b1;
    sync_warp();
    const int g = lane() / 4, t = lane() % 4;
    u32 r[4];
    for (int out = 0; out < 4; ++out) {
        const int row = g + (out >= 2 ? 8 : 0), column = 2 * t + (out & 1);
        r[out] = c[out];
        for (int k = 0; k < 32; ++k) {
            const int part = k & 3, quad = (k % 16) / 4, upper = k >= 16;
            const u32 left = warp.a[(row % 8) * 4 + quad][(row >= 8 ? 1 : 0) + (upper ? 2 : 0)];
            const u32 right = warp.b[column * 4 + quad][upper];
            r[out] += u32(int(u8(left >> 8 * part)) * int((signed char)(u8(right >> 8 * part))));
        }
    }
    sync_warp();
    memcpy(d, r, sizeof r);
}

FN u32 permute_bytes(u32 low, u32 high, u32 which) {
    const u64 both = u64(high) << 32 | low;
    u32 r = 0;
    for (int n = 0; n < 4; ++n) r |= u32(u8(both >> 8 * ((which >> 4 * n) & 7))) << 8 * n;
    return r;
}

FN i32 round_to_int(float v) {                     // saturates, and NaN is 0, as on hardware
    if (v != v) return 0;
    return v >= 0x1p31f ? 0x7FFFFFFF : v < -0x1p31f ? i32(1u << 31) : i32(lrintf(v));
}

FN u32 warp_max_bits(u32 v) { return warp_max(v); }

FN u32 load_once(const u32* from) {
    if ((size_t)from & 3) emulator::fail(emulator::MISALIGNED);
    return *from;
}

// An mbarrier holds the number of bytes still to arrive. Hardware has remote stores in clusters
// only.

FN void check_cluster() { if (emulator::cluster_blocks == 1) emulator::fail(emulator::ALONE); }
FN void mbarrier_expect(u64* mbarrier, u32 bytes) { check_cluster(); *mbarrier = bytes; }
FN void cluster_arrive_relaxed() { cluster_arrive(); }

template <typename T> FN void remote_store(T* here, int rank, T value, u64* mbarrier) {
    check_cluster();
    if (sizeof(T) == 16) emulator::check_aligned(here);
    memcpy((void*)of_rank(here, rank), &value, sizeof value);
    *of_rank(mbarrier, rank) -= sizeof value;
}

FN void mbarrier_wait(u64* mbarrier) {
    for (int n = 0; *mbarrier; ++n) {
        if (n > 1000000) emulator::fail(emulator::STUCK);
        emulator::leave_to_scheduler();
    }
}
