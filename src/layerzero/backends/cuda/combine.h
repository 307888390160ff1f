// How the warps of a block, and the blocks of a cluster, add up what each found of some rows of the output. A warp
// leaves its part in shared memory; a block adds up its warps' and sends each block of the cluster its share of the
// columns, straight into its inbox in shared memory, which an mbarrier counts. So there is one trip between blocks,
// no fence and no barrier at the end.
// Macros: WARPS, SPLITS (blocks of the cluster). device.h comes first.
#pragma once

struct alignas(8) Two { float x, y; };

constexpr float NONE = -1e30f;                     // a maximum of nothing; finite, so that a difference is no NaN

FN Four as_bits(const float (&v)[4]) {
    return Four{float_bits(v[0]), float_bits(v[1]), float_bits(v[2]), float_bits(v[3])};
}

// Up to MOST rows of WIDTH columns. The part of a warp is rows of PITCH floats, then of each row its maximum and sum.
template <int MOST, int WIDTH> struct Combine {
    static constexpr int PITCH = WIDTH + 4, QUADS = WIDTH / 4, SHARE = (QUADS + SPLITS - 1) / SPLITS;
    static constexpr int PART = (MOST * (PITCH + 2) * 4 + 15) / 16 * 16;        // bytes
    static constexpr int INBOX_BYTES = SPLITS * MOST * SHARE * 16;
    Four* inbox;                                   // of each block, row and quad of columns
    u64* facts;                                    // of each block and row: maximum and sum
    u64* mbarrier;
    int rank;                                      // of this block
};

FN float* row_of(u8* part, int row, int pitch) { return (float*)part + row * pitch; }
FN Two* fact_of(u8* part, int row, int most, int pitch) { return (Two*)((float*)part + most * pitch) + row; }

template <int MOST, int WIDTH> FN Combine<MOST, WIDTH> combine_in(u8* room, int rank) {
    typedef Combine<MOST, WIDTH> Its;
    u64* facts = (u64*)(room + Its::INBOX_BYTES);
    return Its{(Four*)room, facts, facts + SPLITS * MOST, rank};
}

// All warps call it before they send. Remote stores may arrive from then on.
template <int MOST, int WIDTH> FN void open(const Combine<MOST, WIDTH>& m, int used) {
    if (SPLITS == 1) return;
    const int quads = (m.QUADS - m.rank + SPLITS - 1) / SPLITS;                // of columns that this block writes
    if (thread() == 0) mbarrier_expect(m.mbarrier, SPLITS * used * (quads * 16 + 8));
    cluster_here();
}

// A block on its own is no cluster, and has no mbarrier.
template <typename T> FN void store_to(T* here, int rank, T value, u64* mbarrier) {
    if (SPLITS == 1) *here = value;
    else remote_store(here, rank, value, mbarrier);
}

// After this warp has left its part; parts are so many bytes apart.
template <int MOST, int WIDTH>
FN void send(const Combine<MOST, WIDTH>& m, u8* parts, int apart, int used) {
    sync_block();
    if (SPLITS > 1) cluster_wait();                // all blocks have opened their mbarriers
    ROLLED for (int row = warp(); row < used; row += WARPS) {
        float top = NONE, sum = 0;
        Two its[WARPS];
        UNROLL for (int w = 0; w < WARPS; ++w) its[w] = *fact_of(parts + w * apart, row, MOST, m.PITCH);
        UNROLL for (int w = 0; w < WARPS; ++w) top = fmaxf(top, its[w].x);
        UNROLL for (int w = 0; w < WARPS; ++w) {
            its[w].x = fast_exp2(its[w].x - top);
            sum += its[w].x * its[w].y;
        }
        if (lane() < SPLITS)
            store_to(m.facts + m.rank * MOST + row, lane(), (u64)float_bits(sum) << 32 | float_bits(top), m.mbarrier);
        ROLLED for (int quad = lane(); quad < m.QUADS; quad += 32) {
            float out[4] = {0, 0, 0, 0};
            UNROLL for (int w = 0; w < WARPS; ++w) {
                const Four v = load4(row_of(parts + w * apart, row, m.PITCH) + quad * 4);
                out[0] += its[w].x * bits_float(v.x);
                out[1] += its[w].x * bits_float(v.y);
                out[2] += its[w].x * bits_float(v.z);
                out[3] += its[w].x * bits_float(v.w);
            }
            store_to(m.inbox + (m.rank * MOST + row) * m.SHARE + quad / SPLITS, quad % SPLITS, as_bits(out),
                     m.mbarrier);
        }
    }
}

// Two columns at a time: write(row, column, both, maximum, sum), not yet divided by the sum.
template <int MOST, int WIDTH, typename Write>
FN void receive(const Combine<MOST, WIDTH>& m, int used, Write write) {
    constexpr int PAIRS = Combine<MOST, WIDTH>::SHARE * 2;
    if (SPLITS == 1) sync_block();
    if (thread() >= used * PAIRS) return;
    if (SPLITS > 1) mbarrier_wait(m.mbarrier);
    ROLLED for (int item = thread(); item < used * PAIRS; item += WARPS * 32) {
        const int row = item / PAIRS, pair = item % PAIRS, column = (pair / 2 * SPLITS + m.rank) * 4 + pair % 2 * 2;
        if (m.QUADS % SPLITS && column >= WIDTH) continue;
        float top = NONE, sum = 0;
        Two out = {0, 0}, its[SPLITS];
        UNROLL for (int b = 0; b < SPLITS; ++b) {
            its[b] = *(const Two*)(m.facts + b * MOST + row);
            top = fmaxf(top, its[b].x);
        }
        UNROLL for (int b = 0; b < SPLITS; ++b) {
            const float share = fast_exp2(its[b].x - top);
            const Two both = *((const Two*)(m.inbox + (b * MOST + row) * m.SHARE) + pair);
            sum += share * its[b].y;
            out.x += share * both.x;
            out.y += share * both.y;
        }
        write(row, column, out, top, sum);
    }
}
