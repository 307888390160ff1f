// The producer warps of step.cu, the last COPIERS of a block: they copy the tiles of the weights and of the
// KV cache through the ring. Each of them visits all tiles. The first one issues bulk copies; a tile of the
// cache that is copied by lanes is split between all of them.

// A tile of 16 rows is two boxes of 8 rows, BLOCKS times 128 inputs of each; then the scales of int4. A
// run of 128 bytes has RUN inputs.
constexpr int RUN = CODES == 1 ? 256 : 128;
FN constexpr int code_blocks(int k, int slices) { return (k / RUN + slices - 1) / slices * (RUN / 128); }
FN constexpr int box_bytes(int blocks) { return blocks * (128 * 1024 / RUN); }

FN int copier() { return warp() - WARPS; }

struct Producer {
    const Watch& watch;
    int next, phase, first;                        // tile, phase, and the block that begins the phase
    int issued;

    // Waits for a free stage and returns it; null when the launch has given up
    FN_MEMBER u8* acquire() {
        const int stage = next % STAGES, round = next / STAGES;
        if (round) wait_watching(empty(stage), (round - 1) & 1, watch);
        const int flight = phase > *phase_now() ? AHEAD : FLIGHT;
        if (flight < STAGES && next >= flight)
            wait_watching(full((next - flight) % STAGES), ((next - flight) / STAGES) & 1, watch);
        if (shuffle(*lost(), 0)) return nullptr;
        issued = next + 1;
        return shared() + stage * STAGE;
    }

    FN_MEMBER u8* acquire(u32 bytes) {             // of this warp's bulk copies, maybe none
        u8* stage = acquire();
        if (stage && lane() == 0) mbarrier_arrive_expect(full(next % STAGES), bytes);
        return stage;
    }

#if ONE_LOOP
    // Copies a weight of rows x k, in tiles of `each` rows or in slices of a row. One code for all weights.
    FN_MEMBER void plain(const u16* weight, int rows, int k, int each, int slices) {
        const Share share = take(first, ceil_div(rows, each));
        const int length = k / slices;
        ROLLED for (int n = 0; n < share.count; n += slices == 1 ? 1 : WARPS)
            ROLLED for (int slice = 0; slice < slices; ++slice)
                ROLLED for (int e = n; e < n + (slices == 1 ? 1 : together(n, share.count)); ++e, ++next) {
                    const int row = share.item(e) * each;
                    const int many = copier() == 0 ? min_int(each, rows - row) : 0;
                    u8* to = acquire(many * length * 2);
                    if (lane() || !many || !to) continue;
                    const u16* from = weight + i64(row) * k + slice * length;
                    const int copies = slices == 1 ? 1 : many, bytes = (slices == 1 ? many : 1) * length * 2;
                    ROLLED for (int r = 0; r < copies; ++r)
                        copy_bulk(to + r * bytes, from + i64(r) * k, bytes, full(next % STAGES));
                }
        ++phase;
    }
#else
    // Copies a weight of rows x K, in tiles of ROWS rows or in slices of a row
    template <int K, int ROWS, int SLICES> FN_MEMBER void plain(const u16* weight, int rows) {
        const Share share = take(first, ceil_div(rows, ROWS));
        for (int n = 0; n < share.count; n += SLICES == 1 ? 1 : WARPS)
            for (int slice = 0; slice < SLICES; ++slice)
                for (int e = n; e < n + (SLICES == 1 ? 1 : together(n, share.count)); ++e, ++next) {
                    const int row = share.item(e) * ROWS;
                    const int many = copier() == 0 ? min_int(ROWS, rows - row) : 0;
                    u8* to = acquire(many * (K / SLICES * 2));
                    if (lane() || !many || !to) continue;
                    const u16* from = weight + i64(row) * K + slice * (K / SLICES);
                    if (SLICES == 1) copy_bulk(to, from, many * K * 2, full(next % STAGES));
                    else for (int r = 0; r < many; ++r)
                        copy_bulk(to + r * (K / SLICES * 2), from + i64(r) * K, K / SLICES * 2, full(next % STAGES));
                }
        ++phase;
    }
#endif

    // Rows of gate and those of up, INNER later, in one tile
    template <int K, int PAIRS, int SLICES> FN_MEMBER void gated(const u16* weight) {
        constexpr int TILES = PAIRS == 1 ? 2 * SLICES : 1, VALUES = PAIRS == 1 ? 2 : PAIRS;
        const Share share = take(first, INNER / VALUES);
        for (int n = 0; n < share.count; n += TILES == 1 ? 1 : WARPS)
            for (int tile = 0; tile < TILES; ++tile)
                for (int e = n; e < n + (TILES == 1 ? 1 : together(n, share.count)); ++e, ++next) {
                    constexpr u32 bytes = PAIRS * (K / SLICES) * 2;
                    u8* to = acquire(copier() ? 0 : 2 * bytes);
                    if (lane() || copier() || !to) continue;
                    const i64 row = share.item(e) * VALUES + (PAIRS == 1 ? tile / SLICES : 0);
                    const u16* from = weight + row * K + (PAIRS == 1 ? tile % SLICES * (K / SLICES) : 0);
                    copy_bulk(to, from, bytes, full(next % STAGES));
                    copy_bulk(to + bytes, from + i64(INNER) * K, bytes, full(next % STAGES));
                }
        ++phase;
    }

#if CODES
    // Copies codes of 16 rows, or of 8 rows of gate and 8 of up; a warp consumes every WARPS-th slice
    template <int K, int SLICES> FN_MEMBER void coded(const TensorMap* codes, const u8* scales, int rows, bool is_gated) {
        constexpr int BLOCKS = code_blocks(K, SLICES), BOX = box_bytes(BLOCKS), SCALES = CODES == 1 ? BLOCKS * 32 : 0;
        const Share share = take(first, is_gated ? INNER / 8 : ceil_div(rows, 16));
        for (int n = 0; n < share.count; ++n)
            for (int slice = 0; slice < SLICES; ++slice, ++next) {
                const int item = share.item(n);
                const bool is_mine = copier() == 0 && slice * BLOCKS < K / 128;
                u8* to = acquire(is_mine ? 2 * BOX + SCALES : 0);
                sync_warp();
                if (!to || !is_mine) continue;
                if (lane() < 2)
                    copy_box(to + lane() * BOX, codes, is_gated ? item * 8 + lane() * INNER : item * 16 + lane() * 8,
                             slice * (BLOCKS * 128 / RUN), full(next % STAGES));
                else if (SCALES && lane() == 2)
                    copy_bulk(to + 2 * BOX, scales + (i64(item) * SLICES + slice) * SCALES, SCALES, full(next % STAGES));
            }
        ++phase;
    }
#endif

    // Copies keys, then values, to the layout of `cached_at`. Rows that fill no whole box are copied by 16
    // bytes; in place of rows past the end the last one is copied again.
    FN_MEMBER void cached(const Layer& at, const TensorMap* maps, const Spread& over, i64 capacity) {
        const Share share = take(first, over.workers());
        for (int n = 0; n < share.count; ++n) {
            const int split = share.item(n) % over.splits, pair = share.item(n) / over.splits;
            const int end = over.end(split), tiles = over.tiles(split);
            const i64 row = pair / KV_HEADS * capacity;
            const int head = pair % KV_HEADS;
            for (int tile = 0; tile < tiles; ++tile, ++next) {
                const int begin = over.begin(split) + tile * TOKENS;
                if (BOXES && begin + TOKENS <= end) {
                    const bool is_mine = copier() == 0;
                    u8* to = acquire(is_mine ? 2 * CACHED : 0);
                    sync_warp();
                    if (to && is_mine && lane() < 2)
                        copy_box(to + lane() * CACHED, maps + lane(), int(row) + begin, head * (DIM / 64), full(next % STAGES));
                    continue;
                }
                u8* to = acquire();
                if (!to) continue;
                constexpr int UNITS = DIM / 8;
                const int many = min_int(TOKENS, ceil_div(end - begin, 16) * 16);
                ROLLED for (int e = copier() * 32 + lane(); e < many * UNITS; e += 32 * COPIERS) {
                    const i64 from = ((row + min_int(begin + e / UNITS, end - 1)) * KV_HEADS + head) * DIM + e % UNITS * 8;
                    u8* place = to + cached_at(e / UNITS, e % UNITS);
                    copy_small(place, at.keys + from);
                    copy_small(place + CACHED, at.values + from);
                }
                copies_arrive(full(next % STAGES));
                sync_warp();                       // the phase can end only when all lanes have joined it
                if (lane() == 0) mbarrier_arrive(full(next % STAGES));
            }
        }
        ++phase;
    }
};
