// The primitives of backends/cuda/stream.h on a CPU. A bulk copy takes effect only when someone has
// asked its mbarrier in vain, and what it will overwrite is not a number until then; every word that
// is read lets other threads run.
#pragma once

#include "device.h"
#include <list>
#include <map>

#define FN_MEMBER inline
#define OUTLINE static
#define KERNEL_ALONE KERNEL

namespace emulator {

struct Mbarrier { i32 bytes; u8 expected, pending, parity, unused; };
struct BulkCopy { u8* to; const u8* from; u32 bytes; u64* mbarrier; };
static std::vector<BulkCopy> in_flight;
static u64 asked;

static Mbarrier& of(u64* mbarrier) { return *(Mbarrier*)mbarrier; }

static void settle(Mbarrier& at) {
    if (at.pending == 0 && at.bytes == 0) { at.pending = at.expected; at.parity ^= 1; }
}

static void land(u64* mbarrier) {
    for (size_t n = 0; n < in_flight.size(); ++n) {
        const BulkCopy copy = in_flight[n];
        if (copy.mbarrier != mbarrier) continue;
        in_flight.erase(in_flight.begin() + n);
        memcpy(copy.to, copy.from, copy.bytes);
        of(mbarrier).bytes -= copy.bytes;
        settle(of(mbarrier));
        return;
    }
}

}  // namespace emulator

FN void mbarrier_init(u64* mbarrier, u32 arrivals) {
    emulator::of(mbarrier) = {0, u8(arrivals), u8(arrivals), 0, 0};
}

FN void mbarriers_ready() {}

FN void mbarrier_arrive_expect(u64* mbarrier, u32 bytes) {
    emulator::Mbarrier& at = emulator::of(mbarrier);
    if (at.pending == 0) emulator::fail(emulator::STUCK);
    at.bytes += bytes;
    --at.pending;
    emulator::settle(at);
}

FN void mbarrier_arrive(u64* mbarrier) { mbarrier_arrive_expect(mbarrier, 0); }

FN bool mbarrier_passed(u64* mbarrier, u32 parity) {
    if (emulator::of(mbarrier).parity != parity) return true;
    emulator::land(mbarrier);
    emulator::leave_to_scheduler();
    return emulator::of(mbarrier).parity != parity;
}

FN void copy_bulk(void* place, const void* from, u32 bytes, u64* mbarrier) {
    emulator::check_aligned(place);
    emulator::check_aligned(from);
    if (bytes % 16) emulator::fail(emulator::MISALIGNED);
    memset(place, 0xFF, bytes);
    emulator::in_flight.push_back({(u8*)place, (const u8*)from, bytes, mbarrier});
}

struct TensorMap { const u8* base; i64 rows, runs, row_bytes, box_runs, box_rows; u8 rest[80]; };   // test_step_emulated.py

namespace emulator { static std::list<std::vector<u8>> boxes; }

FN int swizzled(int row, int unit) { return (unit ^ row) * 16; }

// The box is made when it is asked for, and arrives as any bulk copy does.
FN void copy_box(void* place, const TensorMap* map, int row, int run, u64* mbarrier) {
    const int run_bytes = int(map->box_rows) * 128, bytes = int(map->box_runs) * run_bytes;
    if (((u8*)place - shared()) % 1024) emulator::fail(emulator::MISALIGNED);
    emulator::boxes.emplace_back(bytes, 0);
    u8* box = emulator::boxes.back().data();
    for (int n = 0; n < map->box_runs; ++n)
        for (int r = 0; r < map->box_rows; ++r)
            for (int unit = 0; unit < 8 && row + r < map->rows && run + n < map->runs; ++unit)
                memcpy(box + n * run_bytes + r * 128 + swizzled(r % 8, unit),
                       map->base + (row + r) * map->row_bytes + (run + n) * 128 + unit * 16, 16);
    memset(place, 0xFF, bytes);
    emulator::in_flight.push_back({(u8*)place, box, u32(bytes), mbarrier});
}

FN void map_ready(const TensorMap*) {}
FN void prefetch_map(const TensorMap*) {}

FN void copy_small(void* place, const void* from) { copy_async(place, from, true); }

FN void copies_arrive(u64* mbarrier) {
    for (const emulator::Copy& copy : emulator::now->open) {
        emulator::of(mbarrier).bytes += 16;
        emulator::in_flight.push_back({copy.to, copy.from, 16, mbarrier});
    }
    emulator::now->open.clear();
}

FN u32 masked_xor(u32 a, u32 mask, u32 bits) { return (a & mask) ^ bits; }

FN float max_or_nan(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }

FN void mma_s8(u32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    u32 raised[4], of_128[4];                      // a is that of unsigned bytes, less 128
    const u32 none[4] = {0, 0, 0, 0}, all_128[4] = {0x80808080u, 0x80808080u, 0x80808080u, 0x80808080u};
    for (int n = 0; n < 4; ++n) raised[n] = a[n] ^ 0x80808080u;
    mma_u8_s8(of_128, all_128, b[0], b[1], none);
    mma_u8_s8(d, raised, b[0], b[1], d);
    for (int n = 0; n < 4; ++n) d[n] -= of_128[n];
}

FN u32 fp8_pair(u32 codes) {
    float v[2];
    for (int n = 0; n < 2; ++n) {
        const u32 code = codes >> 8 * n & 0xFF, exponent = code >> 3 & 15, mantissa = code & 7;
        v[n] = exponent ? ldexpf(8 + mantissa, int(exponent) - 10) : ldexpf(mantissa, -9);
        if (code & 0x80) v[n] = -v[n];
    }
    return pack2<false>(v[0], v[1]);
}

FN void fp8_pairs(u32 codes, u32& first, u32& second) { first = fp8_pair(codes), second = fp8_pair(codes >> 16); }

struct alignas(16) Words { u64 x, y; };

FN Words peek2(const u64* from) { emulator::check_aligned(from); return {from[0], from[1]}; }
FN Words peek_whole(const u64* from) { return peek2(from); }
FN void post_whole(u64* to, Words v) { emulator::check_aligned(to); to[0] = v.x, to[1] = v.y; }
FN u64 peek(const u64* from) { return *from; }
FN void post(u64* to, u64 v) { *to = v; }
FN u32 peek_flag(const u32* from) { return *from; }
FN void post_flag(u32* to, u32 v) { *to = v; }

// Barriers of some threads of a block, by number
namespace emulator {
static std::map<std::pair<Block*, int>, Gate> some;
static Gate& gate_of(int barrier, int threads) {
    Gate& gate = some[{now->block, barrier}];
    gate.expected = threads;
    return gate;
}
}  // namespace emulator

FN void sync_some(int barrier, int threads) { emulator::arrive_and_wait(emulator::gate_of(barrier, threads)); }
FN void arrive_some(int barrier, int threads) { emulator::arrive(emulator::gate_of(barrier, threads)); }
FN void sync_first(int threads) { sync_some(1, threads); }

FN void publish() {}
FN u64 clock_ns() { return emulator::asked += 1000; }
FN void yield() { emulator::leave_to_scheduler(); }
