// Hopper's matrix products of four warps: d = a x b (+ d), 64 x N x 16, asynchronous. Operands in
// shared memory are rows of 128 bytes, of which eight are swizzled together. Include device.h
// first; tests/emulator/wgmma.h runs them on a CPU.
#pragma once

FN u8* aligned_shared() {                          // to 1024 bytes, as swizzled operands must be
    u8* const at = shared();
    return at + (-shared_address(at) & 1023);
}

// The part of an operand's matrix descriptor that differs between operands. A row of keys and of values is a key;
// `next_half` is the distance in bytes to the next 64 columns of values. operand + n is 16 n bytes further. The shuffle
// tells the compiler that it is the same in all lanes.
FN u32 operand(const u8* at, int next_half = 16) {
    return shuffle(u32(next_half >> 4) << 16 | (shared_address(at) & 0x3FFFF) >> 4, 0);
}

FN u64 descriptor(u32 operand) {
    constexpr u64 SWIZZLED = 1ull << 62, EIGHT_ROWS = u64(1024 >> 4) << 32;
    return SWIZZLED | EIGHT_ROWS | operand;
}

FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> FN void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
// What was copied to shared memory is seen by products that begin after a barrier. Without the scope it takes a microsecond.
FN void show_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Keeps the compiler from moving uses of registers across a wait.
template <int N> FN void pin(float (&d)[N]) { UNROLL for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i]) :: "memory"); }

#define LZ_D32 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define LZ_D64 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define LZ_R8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                 "+f"(d[i + 6]), "+f"(d[i + 7])
#define LZ_R32(i) LZ_R8(i), LZ_R8(i + 8), LZ_R8(i + 16), LZ_R8(i + 24)

// d (64 x 64) = a x b^T (+ d): rows of both are in shared memory.
#define LZ_SCORES(TYPE) \
    asm volatile("{ .reg .pred more; setp.ne.b32 more, %34, 0; " \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " LZ_D32 ", %32, %33, more, 1, 1, 0, 0; }" \
                 : LZ_R32(0) : "l"(descriptor(a)), "l"(descriptor(b)), "r"((int)more))
template <bool IS_BF16> FN void wgmma_rows(float (&d)[32], u32 a, u32 b, bool more) {
    if (IS_BF16) LZ_SCORES("bf16");
    else LZ_SCORES("f16");
}

// d (64 x 64 or 128) += a x b: a is 16 rows of each warp in registers, as of mma; b 16 rows in shared memory.
#define LZ_SUM32(TYPE) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " LZ_D32 ", {%32, %33, %34, %35}, %36, " \
                 "1, 1, 1, 1;" : LZ_R32(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)))
#define LZ_SUM64(TYPE) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " LZ_D64 ", {%64, %65, %66, %67}, %68, " \
                 "1, 1, 1, 1;" : LZ_R32(0), LZ_R32(32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b)))
template <bool IS_BF16> FN void wgmma_columns(float (&d)[32], const u32 (&a)[4], u32 b) {
    if (IS_BF16) LZ_SUM32("bf16");
    else LZ_SUM32("f16");
}
template <bool IS_BF16> FN void wgmma_columns(float (&d)[64], const u32 (&a)[4], u32 b) {
    if (IS_BF16) LZ_SUM64("bf16");
    else LZ_SUM64("f16");
}
