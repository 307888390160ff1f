// Combines partial softmax results: the warps of a block and the blocks of a cluster add up their
// parts of the output rows. A warp stores its part in shared memory; a block adds up its warps'
// parts and sends each block of the cluster its share of the columns, by remote stores into that
// block's inbox in shared memory, which an mbarrier counts. So there is one exchange between
// blocks, no fence and no barrier at the end. Macros: WARPS, SPLITS (blocks of the cluster).
// Include device.h first.
#pragma once

struct alignas(8) Float2 { float x, y; };

constexpr float NONE = -1e30f;                     // the maximum of no key; finite, so that differences are not NaN

FN Four to_four(const float (&v)[4]) {
    return Four{float_bits(v[0]), float_bits(v[1]), float_bits(v[2]), float_bits(v[3])};
}

// Up to MAX_ROWS rows of WIDTH columns. A warp's part is rows of PITCH floats, then the maximum and sum
// of each row.
template <int MAX_ROWS, int WIDTH> struct Combine {
    static constexpr int PITCH = WIDTH + 4, QUADS = WIDTH / 4, SHARE = (QUADS + SPLITS - 1) / SPLITS;
    static constexpr int PART = (MAX_ROWS * (PITCH + 2) * 4 + 15) / 16 * 16;    // bytes
    static constexpr int INBOX_BYTES = SPLITS * MAX_ROWS * SHARE * 16;
    Four* inbox;                                   // per block, row and quad of columns
    u64* max_sums;                                 // per block and row: maximum and sum
    u64* mbarrier;
    int rank;                                      // of this block
};

FN float* row_of(u8* part, int row, int pitch) { return (float*)part + row * pitch; }
FN Float2* max_sum_of(u8* part, int row, int most, int pitch) { return (Float2*)((float*)part + most * pitch) + row; }

template <int MAX_ROWS, int WIDTH> FN Combine<MAX_ROWS, WIDTH> make_combine(u8* memory, int rank) {
    typedef Combine<MAX_ROWS, WIDTH> Layout;
    u64* max_sums = (u64*)(memory + Layout::INBOX_BYTES);
    return Layout{(Four*)memory, max_sums, max_sums + SPLITS * MAX_ROWS, rank};
}

// All warps call it before they send. Remote stores may arrive from then on.
template <int MAX_ROWS, int WIDTH> FN void open_inbox(const Combine<MAX_ROWS, WIDTH>& m, int used) {
    if (SPLITS == 1) return;
    const int quads = (m.QUADS - m.rank + SPLITS - 1) / SPLITS;                // of columns that this block stores
    if (thread() == 0) mbarrier_expect(m.mbarrier, SPLITS * used * (quads * 16 + 8));
    cluster_arrive_relaxed();
}

// A single block is not a cluster, and has no mbarrier.
template <typename T> FN void store_to(T* here, int rank, T value, u64* mbarrier) {
    if (SPLITS == 1) *here = value;
    else remote_store(here, rank, value, mbarrier);
}

// After this warp has stored its part; `part_bytes` is the distance between parts.
template <int MAX_ROWS, int WIDTH>
FN void send(const Combine<MAX_ROWS, WIDTH>& m, u8* parts, int part_bytes, int used) {
    sync_block();
    if (SPLITS > 1) cluster_wait();                // all blocks have opened their mbarriers
    ROLLED for (int row = warp(); row < used; row += WARPS) {
        float top = NONE, sum = 0;
        Float2 stats[WARPS];
        UNROLL for (int w = 0; w < WARPS; ++w) stats[w] = *max_sum_of(parts + w * part_bytes, row, MAX_ROWS, m.PITCH);
        UNROLL for (int w = 0; w < WARPS; ++w) top = fmaxf(top, stats[w].x);
        UNROLL for (int w = 0; w < WARPS; ++w) {
            stats[w].x = fast_exp2(stats[w].x - top);
            sum += stats[w].x * stats[w].y;
        }
        if (lane() < SPLITS)
            store_to(m.max_sums + m.rank * MAX_ROWS + row, lane(), (u64)float_bits(sum) << 32 | float_bits(top), m.mbarrier);
        ROLLED for (int quad = lane(); quad < m.QUADS; quad += 32) {
            float out[4] = {0, 0, 0, 0};
            UNROLL for (int w = 0; w < WARPS; ++w) {
                const Four v = load4(row_of(parts + w * part_bytes, row, m.PITCH) + quad * 4);
                out[0] += stats[w].x * bits_float(v.x);
                out[1] += stats[w].x * bits_float(v.y);
                out[2] += stats[w].x * bits_float(v.z);
                out[3] += stats[w].x * bits_float(v.w);
            }
            store_to(m.inbox + (m.rank * MAX_ROWS + row) * m.SHARE + quad / SPLITS, quad % SPLITS, to_four(out),
                     m.mbarrier);
        }
    }
}

// Calls write(row, column, both, maximum, sum) for two columns at a time, not yet divided by the
// sum.
template <int MAX_ROWS, int WIDTH, typename Write>
FN void receive(const Combine<MAX_ROWS, WIDTH>& m, int used, Write write) {
    constexpr int PAIRS = Combine<MAX_ROWS, WIDTH>::SHARE * 2;
    if (SPLITS == 1) sync_block();
    if (thread() >= used * PAIRS) return;
    if (SPLITS > 1) mbarrier_wait(m.mbarrier);
    ROLLED for (int item = thread(); item < used * PAIRS; item += WARPS * 32) {
        const int row = item / PAIRS, pair = item % PAIRS, column = (pair / 2 * SPLITS + m.rank) * 4 + pair % 2 * 2;
        if (m.QUADS % SPLITS && column >= WIDTH) continue;
        float top = NONE, sum = 0;
        Float2 out = {0, 0}, stats[SPLITS];
        UNROLL for (int b = 0; b < SPLITS; ++b) {
            stats[b] = *(const Float2*)(m.max_sums + b * MAX_ROWS + row);
            top = fmaxf(top, stats[b].x);
        }
        UNROLL for (int b = 0; b < SPLITS; ++b) {
            const float share = fast_exp2(stats[b].x - top);
            const Float2 both = *((const Float2*)(m.inbox + (b * MAX_ROWS + row) * m.SHARE) + pair);
            sum += share * stats[b].y;
            out.x += share * both.x;
            out.y += share * both.y;
        }
        write(row, column, out, top, sum);
    }
}
