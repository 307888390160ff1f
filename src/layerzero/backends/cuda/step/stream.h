// What a persistent kernel needs beyond device.h: bulk copies that complete mbarriers of the block's
// own shared memory, words of 8 bytes that blocks exchange through global memory, and barriers of
// some warps of a block. An emulator has the same names (tests/emulator/stream.h).
#pragma once

#include "device.h"

#define FN_MEMBER __device__ __forceinline__
#define OUTLINE __device__ __noinline__
// One block to a multiprocessor: it may use all registers.
#define KERNEL_ALONE(name, Params, threads) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ Params p)

FN void mbarrier_init(u64* mbarrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(mbarrier)), "r"(arrivals) : "memory");
}

FN void mbarriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

FN void mbarrier_arrive(u64* mbarrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(mbarrier)) : "memory");
}

// Arrives, and lets the phase also wait for `bytes` bytes of bulk copies.
FN void mbarrier_arrive_expect(u64* mbarrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(mbarrier)), "r"(bytes)
                 : "memory");
}

// Is the phase of this parity complete? Waits a little before it says no.
FN bool mbarrier_passed(u64* mbarrier, u32 parity) {
    u32 complete;
    asm volatile("{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; "
                 "selp.u32 %0, 1, 0, done; }" : "=r"(complete) : "r"(shared_address(mbarrier)), "r"(parity) : "memory");
    return complete;
}

// Sizes and addresses are multiples of 16.
FN void copy_bulk(void* place, const void* from, u32 bytes, u64* mbarrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(place)), "l"(from), "r"(bytes), "r"(shared_address(mbarrier)) : "memory");
}

// How a box of rows of a matrix of bytes is copied at once (tensor_maps.py): runs of 128 bytes, those
// of all rows together, and in each the units of 16 bytes at `swizzled` of the row's number modulo 8.
struct alignas(64) TensorMap { u8 opaque[128]; };

FN int swizzled(int row, int unit) { return (unit ^ row) * 16; }

// The box that begins at this row and run; what is outside of the matrix is 0, and counts as copied.
FN void copy_box(void* place, const TensorMap* map, int row, int run, u64* mbarrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(shared_address(place)), "l"(map), "r"(0), "r"(row), "r"(run), "r"(shared_address(mbarrier))
                 : "memory");
}

// Before the first copy of a launch by this map: the host wrote it
FN void map_ready(const TensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(map) : "memory");
}

FN void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }

// Of 16 bytes each; arrives at the mbarrier once what this thread has asked for so far is there, for
// which the phase waits in addition to the arrivals that it expects.
FN void copy_small(void* place, const void* from) { copy_async(place, from, true); }
FN void copies_arrive(u64* mbarrier) {
    asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" :: "r"(shared_address(mbarrier)) : "memory");
}

// a & mask ^ bits, in one instruction: of two constants the compiler makes two
FN u32 masked_xor(u32 a, u32 mask, u32 bits) {
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(v) : "r"(a), "r"(mask), "r"(bits));
    return v;
}

FN float max_or_nan(float a, float b) {
    float v;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}

// Tensor cores: d += a x b, 16 x 8 x 32, signed, four per register
FN void mma_s8(u32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four codes of fp8_e4m3 as pairs of fp16
FN void fp8_pairs(u32 codes, u32& first, u32& second) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(first), "=r"(second) : "r"(codes));
}

struct alignas(16) Words { u64 x, y; };

FN Words peek2(const u64* from) {                  // each word is whole; the two may be of different times
    Words v;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(from) : "memory");
    return v;
}

FN Words peek_whole(const u64* from) {             // both are of the same time
    Words v;
    asm volatile("{ .reg .b128 v; ld.relaxed.gpu.global.b128 v, [%2]; mov.b128 {%0, %1}, v; }"
                 : "=l"(v.x), "=l"(v.y) : "l"(from) : "memory");
    return v;
}

FN void post_whole(u64* to, Words v) {
    asm volatile("{ .reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.gpu.global.b128 [%0], v; }"
                 :: "l"(to), "l"(v.x), "l"(v.y) : "memory");
}

FN u64 peek(const u64* from) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}

FN void post(u64* to, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(to), "l"(v) : "memory"); }

FN u32 peek_flag(const u32* from) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

FN void post_flag(u32* to, u32 v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(to), "r"(v) : "memory"); }

// Named barriers of `threads` threads: 0 is the block's. A thread that only arrives does not wait.
FN void sync_some(int barrier, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory"); }
FN void arrive_some(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}
FN void sync_first(int threads) { sync_some(1, threads); }

FN void publish() { __threadfence(); }

FN u64 clock_ns() {
    u64 v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}

FN void yield() {}                                 // where a loop waits for another thread
