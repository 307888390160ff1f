// How the parts of a row are added up, for grouped.cu and grouped_wgmma.cu.
// Include grouped_items.h first.
#pragma once

// Adds up the parts of a row: a warp for each token and head.
constexpr int MERGERS = 8;                         // warps of a block

KERNEL(merge, Params, MERGERS * 32)
{
    const int head = block_x() * MERGERS + warp(), token = block_y();
    if (head >= p.heads) return;
    constexpr int QUADS = DIM / 4, PER_LANE = (QUADS + 31) / 32, AHEAD = 8;
    const Workspace workspace = workspace_of(p);
    float top = NONE, sum = 0, out[PER_LANE][4] = {};
    ROLLED for (int base = 0; base < p.count; base += 32) {
        bool here = false;
        if (base + lane() < p.count) {
            const Item item = item_of(p, base + lane());
            here = item.first <= token && token < item.first + item.n;
        }
        ROLLED for (u32 found = ballot(here); found; found &= found - 1) {
            int index = base;
            while (!(found >> (index - base) & 1)) ++index;
            const Item item = item_of(p, index);
            const Range keys = keys_of(p, item);
            const i32* cuts = workspace.cuts + pass_of(p, index) * (p.splits + 1);
            const i64 row = (i64)(index * p.max_queries + token - item.first) * p.heads + head;
            ROLLED for (int first = 0; first < p.splits; first += 32) {
                const int split = first + lane();
                const bool seen = split < p.splits && max_int(keys.begin, cuts[split]) < min_int(keys.end, cuts[split + 1]);
                const Float2 stats = seen ? workspace.stats[(i64)split * workspace.rows + row] : Float2{NONE, 0};
                const u32 splits = ballot(seen);
                const float higher = fmaxf(top, warp_max(stats.x)), old = fast_exp2(top - higher);
                const float share = fast_exp2(stats.x - higher) * (seen ? 1.0f : 0.0f);
                top = higher;
                sum = sum * old + warp_sum(share * stats.y);
                UNROLL for (int n = 0; n < PER_LANE; ++n)
                    UNROLL for (int i = 0; i < 4; ++i) out[n][i] *= old;
                const int low = -warp_max(seen ? -split : -PAST_KEYS), high = warp_max(seen ? split + 1 : 0);
                ROLLED for (int n = low; n < high; n += AHEAD)
                    UNROLL for (int m = 0; m < AHEAD; ++m) {
                        // where there is no part, another is read in its place and counts nothing
                        const bool real = n + m < high && splits >> (n + m - first) & 1;
                        const float weight = shuffle(share, n + m - first) * (real ? 1.0f : 0.0f);
                        const float* from = workspace.parts + ((i64)(real ? n + m : low) * workspace.rows + row) * DIM;
                        UNROLL for (int i = 0; i < PER_LANE; ++i) {
                            const Four values = load4(from + (i * 32 + lane() % QUADS) * 4);
                            out[i][0] += weight * bits_float(values.x);
                            out[i][1] += weight * bits_float(values.y);
                            out[i][2] += weight * bits_float(values.z);
                            out[i][3] += weight * bits_float(values.w);
                        }
                    }
            }
        }
    }
    const float by = sum > 0 ? reciprocal(sum) : 0.0f;
    const i64 row = (i64)token * p.heads + head;
    UNROLL for (int i = 0; i < PER_LANE; ++i)
        if (i * 32 + lane() < QUADS) {
            u32* to = (u32*)(p.out + row * DIM + (i * 32 + lane()) * 4);
            to[0] = pack2<BF16>(out[i][0] * by, out[i][1] * by);
            to[1] = pack2<BF16>(out[i][2] * by, out[i][3] * by);
        }
    if (p.lse && lane() == 0)
        p.lse[row] = sum > 0 ? (top + fast_log2(sum)) * 0.6931471805599453f : -bits_float(0x7F800000);
}
