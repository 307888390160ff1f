// RMS norm, optionally fused with a residual add, for few rows, where latency is everything. A
// block has one row at a time; all its loads are in flight at once, and its warps synchronise once.
//
// Macros: BF16, HIDDEN (a multiple of 8), THREADS, ADD (a residual), WEIGHT (0: none, 1: like x, 2:
// float32).
#include "device.h"

struct Params {
    const u16 *x, *residual;
    const void* weight;
    u16 *out, *total;
    i64 x_row, residual_row;
    i32 rows;
    float eps, offset;                             // the offset is added to the weight
};

constexpr int UNITS = HIDDEN / 8;                  // of 16 bytes in a row
constexpr int EACH = (UNITS + THREADS - 1) / THREADS;
constexpr int WARPS = THREADS / 32;

FN float low(u32 pair) { return to_float<BF16>(u16(pair)); }
FN float high(u32 pair) { return to_float<BF16>(u16(pair >> 16)); }

KERNEL(rms_norm, Params, THREADS)
{
    float* part = (float*)shared();                // two buffers of sums: those of the previous row may still be read
    float weight[EACH][8];
    UNROLL for (int n = 0; n < EACH; ++n) {
        const int unit = n * THREADS + thread();
        if (unit >= UNITS) continue;
#if WEIGHT == 1
        const Four w = load4((const u16*)p.weight + unit * 8);
        const u32 pairs[4] = {w.x, w.y, w.z, w.w};
        UNROLL for (int e = 0; e < 8; ++e) weight[n][e] = (e % 2 ? high(pairs[e / 2]) : low(pairs[e / 2]));
#elif WEIGHT == 2
        const Four a = load4((const float*)p.weight + unit * 8), b = load4((const float*)p.weight + unit * 8 + 4);
        const u32 bits[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        UNROLL for (int e = 0; e < 8; ++e) weight[n][e] = bits_float(bits[e]);
#else
        UNROLL for (int e = 0; e < 8; ++e) weight[n][e] = 1.0f - p.offset;
#endif
    }
    wait_for_previous();
    ROLLED for (int row = block_x(), odd = 0; row < p.rows; row += grid_x(), odd ^= 1) {
        Four x[EACH];
        UNROLL for (int n = 0; n < EACH; ++n) {
            const int unit = n * THREADS + thread();
            if (unit < UNITS) {
                x[n] = load4(p.x + row * p.x_row + unit * 8);
#if ADD
                const Four y = load4(p.residual + row * p.residual_row + unit * 8);
                x[n] = {pack2<BF16>(low(x[n].x) + low(y.x), high(x[n].x) + high(y.x)),
                        pack2<BF16>(low(x[n].y) + low(y.y), high(x[n].y) + high(y.y)),
                        pack2<BF16>(low(x[n].z) + low(y.z), high(x[n].z) + high(y.z)),
                        pack2<BF16>(low(x[n].w) + low(y.w), high(x[n].w) + high(y.w))};
                store4(p.total + row * (i64)HIDDEN + unit * 8, x[n]);
#endif
            } else {
                x[n] = {0, 0, 0, 0};
            }
        }
        float sum = 0;
        UNROLL for (int n = 0; n < EACH; ++n) {
            const u32 pairs[4] = {x[n].x, x[n].y, x[n].z, x[n].w};
            UNROLL for (int e = 0; e < 4; ++e)
                sum += low(pairs[e]) * low(pairs[e]) + high(pairs[e]) * high(pairs[e]);
        }
        sum = warp_sum(sum);
        if (WARPS > 1) {
            if (lane() == 0) part[odd * WARPS + warp()] = sum;
            sync_block();
            sum = warp_sum(lane() < WARPS ? part[odd * WARPS + lane()] : 0.0f);
        }
        const float inverse_rms = rsqrtf(sum / HIDDEN + p.eps);
        UNROLL for (int n = 0; n < EACH; ++n) {
            const int unit = n * THREADS + thread();
            if (unit >= UNITS) continue;
            const u32 pairs[4] = {x[n].x, x[n].y, x[n].z, x[n].w};
            u32 out[4];
            UNROLL for (int e = 0; e < 4; ++e)
                out[e] = pack2<BF16>(low(pairs[e]) * inverse_rms * (weight[n][2 * e] + p.offset),
                                     high(pairs[e]) * inverse_rms * (weight[n][2 * e + 1] + p.offset));
            store4(p.out + row * (i64)HIDDEN + unit * 8, {out[0], out[1], out[2], out[3]});
        }
    }
}
