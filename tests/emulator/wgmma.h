// The primitives of backends/cuda/wgmma.h on a CPU: each warp computes its 16 of 64 rows at once.
#pragma once

#include "device.h"

FN u8* aligned_shared() { return shared(); }
FN u32 operand(const u8* at, int next_half = 16) { return u32(next_half >> 4) << 16 | u32(at - shared()) >> 4; }
FN void wgmma_fence() { sync_warp(); }
FN void wgmma_commit() {}
template <int N> FN void wgmma_wait() { sync_warp(); }
FN void show_to_wgmma() {}
template <int N> FN void pin(float (&)[N]) {}

namespace emulator {

template <bool IS_BF16> float element(u32 operand, int at) {
    u32 address = (operand & 0xFFFF) * 16 + at;
    address ^= (address >> 7 & 7) << 4;
    u16 half;
    memcpy(&half, shared() + address, 2);
    return to_float<IS_BF16>(half);
}

}  // namespace emulator

template <bool IS_BF16, int N> FN void wgmma_rows(float (&d)[N], u32 a, u32 b, bool more) {
    const int g = lane() / 4, t = lane() % 4;
    for (int i = 0; i < N; ++i) {
        const int row = warp() % 4 * 16 + g + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
        if (!more) d[i] = 0;
        for (int k = 0; k < 16; ++k)
            d[i] += emulator::element<IS_BF16>(a, row * 128 + k * 2) * emulator::element<IS_BF16>(b, column * 128 + k * 2);
    }
    sync_warp();
}

template <bool IS_BF16, int N> FN void wgmma_columns(float (&d)[N], const u32 (&a)[4], u32 b) {
    emulator::Warp& warp = emulator::current_warp();
    memcpy(warp.a[lane()], a, sizeof a);
    sync_warp();
    const int g = lane() / 4, t = lane() % 4;
    for (int i = 0; i < N; ++i) {
        const int row = g + i % 4 / 2 * 8, column = i / 4 * 8 + 2 * t + i % 2;
        for (int k = 0; k < 16; ++k) {
            const u32 left = warp.a[(row % 8) * 4 + k % 8 / 2][(row >= 8 ? 1 : 0) + (k >= 8 ? 2 : 0)];
            d[i] += to_float<IS_BF16>(u16(left >> (16 * (k & 1))))
                    * emulator::element<IS_BF16>(b, column / 64 * int(b >> 16) * 16 + column % 64 * 2 + k * 128);
        }
    }
    sync_warp();
}
