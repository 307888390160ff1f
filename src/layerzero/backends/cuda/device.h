// Thin wrappers over PTX for our CUDA kernels. They need no header of the toolkit, and an emulator
// with the same names runs the kernels on a CPU (tests/emulator/device.h).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct alignas(16) Four { u32 x, y, z, w; };

#define FN __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")                 // small code loads faster into a cold instruction cache
#define KERNEL(name, Params, threads) \
    extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Params p)

// Indices

FN int thread() { return threadIdx.x; }
FN int lane() { return threadIdx.x & 31; }
FN int warp() { return threadIdx.x >> 5; }
FN int block_x() { return blockIdx.x; }
FN int block_y() { return blockIdx.y; }
FN int block_z() { return blockIdx.z; }
FN int grid_x() { return gridDim.x; }

FN u8* shared() {
    extern __shared__ __align__(1024) u8 lz_shared[];  // as copies of boxes need it
    return lz_shared;
}

// Lets the next kernel be launched while this one runs, if a graph says that it may (graph_edges.py).
FN void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Lets the next kernel be launched, and waits for the one before, if a graph let this one begin before
// that had ended (graph_edges.py): ahead of the first thing that other kernels write or read.
FN void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
#endif
}

// Bits

FN u32 float_bits(float v) { return __float_as_uint(v); }
FN float bits_float(u32 v) { return __uint_as_float(v); }

template <bool IS_BF16> FN float to_float(u16 v) {
    if (IS_BF16) return __uint_as_float(u32(v) << 16);
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
}

template <bool IS_BF16> FN u16 from_float(float v) {
    u16 h;
    if (IS_BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}

template <bool IS_BF16> FN u32 pack2(float low, float high) {
    u32 v;
    if (IS_BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

// Threads of a warp and of a block

FN void sync_block() { __syncthreads(); }
FN void sync_warp() { __syncwarp(); }
template <typename T> FN T shuffle_xor(T v, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, v, mask); }
template <typename T> FN T shuffle(T v, int from) { return __shfl_sync(0xFFFFFFFFu, v, from); }
FN int lowest_bit(u32 v) { return __ffs((int)v) - 1; }
FN u32 ballot(bool v) { return __ballot_sync(0xFFFFFFFFu, v); }

template <typename T> FN T warp_sum(T v) {
    UNROLL for (int mask = 16; mask; mask >>= 1) v += shuffle_xor(v, mask);
    return v;
}

template <typename T> FN T warp_max(T v) {
    UNROLL for (int mask = 16; mask; mask >>= 1) {
        const T other = shuffle_xor(v, mask);
        v = other > v ? other : v;
    }
    return v;
}

// Memory

FN Four load4(const void* from) { return *reinterpret_cast<const Four*>(from); }

FN Four load4_once(const void* from) {
    Four v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// Zeros where it is not wanted
FN Four load4_if(const void* from, bool wanted) {
    Four v;
    asm volatile("{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; "
                 "mov.u32 %3, 0; @wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(from), "r"(u32(wanted)));
    return v;
}

FN void store4(void* to, Four v) { *reinterpret_cast<Four*>(to) = v; }

FN u32 shared_address(const void* place) { return u32(__cvta_generic_to_shared(place)); }

FN void copy_async(void* place, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(place)), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

FN void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> FN void copy_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

template <typename T> FN T atomic_add(T* place, T v) { return atomicAdd(place, v); }

// Tensor cores: d += a x b, 16 x 8 x 16; and four 8 x 8 tiles of halves from shared memory, one
// register each

template <bool IS_BF16> FN void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if (IS_BF16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                     "{%8, %9}, {%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                     "{%8, %9}, {%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

FN void ldmatrix4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

FN void ldmatrix4_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// Transposes 8 x 8 halves, two per lane
FN u32 transpose_8x8(u32 v) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

// Powers

FN float fast_exp2(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

FN float fast_log2(float v) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

FN float reciprocal(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

FN float exact_exp(float v) { return expf(v); }

// Clusters: blocks along x that are co-scheduled and access each other's shared memory

FN int cluster_size() {
    u32 v;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(v));
    return v;
}

FN int cluster_rank() {
    u32 v;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
    return v;
}

FN void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
FN void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
FN void sync_cluster() { cluster_arrive(); cluster_wait(); }

// The last barrier; nothing that others wrote may be read after it.
FN void leave_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

FN u32 cluster_address(const void* here, int rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
    return there;
}

template <typename T> FN T cluster_read(const T* here, int rank) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "of 4 or 8 bytes");
    const u32 there = cluster_address(here, rank);
    if (sizeof(T) == 4) {
        union { u32 bits; T value; } v;
        asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v.bits) : "r"(there) : "memory");
        return v.value;
    } else {
        union { u64 bits; T value; } v;
        asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v.bits) : "r"(there) : "memory");
        return v.value;
    }
}

template <typename T> FN void cluster_write(T* here, int rank, T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "of 4 or 8 bytes");
    const u32 there = cluster_address(here, rank);
    if (sizeof(T) == 4) {
        union { u32 bits; T value; } v;
        v.value = value;
        asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(there), "r"(v.bits) : "memory");
    } else {
        union { u64 bits; T value; } v;
        v.value = value;
        asm volatile("st.shared::cluster.u64 [%0], %1;" :: "r"(there), "l"(v.bits) : "memory");
    }
}

// Integers. Tensor cores: d = a x b + c, 16 x 8 x 32; a unsigned, b signed, four per register

FN void mma_u8_s8(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const u32 (&c)[4]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};" : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

FN u32 permute_bytes(u32 low, u32 high, u32 which) { return __byte_perm(low, high, which); }
FN i32 round_to_int(float v) { return __float2int_rn(v); }

FN u32 warp_max_bits(u32 v) {
    u32 r;
    asm volatile("redux.sync.max.u32 %0, %1, 0xFFFFFFFF;" : "=r"(r) : "r"(v));
    return r;
}

FN u32 load_once(const u32* from) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
}

// An mbarrier in shared memory of this block completes when the blocks of the cluster have stored
// `bytes` bytes. One thread initialises it, all arrive at the cluster barrier, and nobody stores
// before all have arrived.

FN void mbarrier_expect(u64* mbarrier, u32 bytes) {
    const u32 at = shared_address(mbarrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(bytes) : "memory");
}

FN void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

FN void remote_store(Four* here, int rank, Four v, u64* mbarrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(cluster_address(here, rank)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),
                    "r"(cluster_address(mbarrier, rank)) : "memory");
}

FN void remote_store(u64* here, int rank, u64 v, u64* mbarrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];"
                 :: "r"(cluster_address(here, rank)), "l"(v), "r"(cluster_address(mbarrier, rank)) : "memory");
}

FN void mbarrier_wait(u64* mbarrier) {
    const u32 at = shared_address(mbarrier);
    u32 complete;
    do {
        asm volatile("{ .reg .pred done; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], 0; "
                     "selp.u32 %0, 1, 0, done; }" : "=r"(complete) : "r"(at) : "memory");
    } while (!complete);
}
