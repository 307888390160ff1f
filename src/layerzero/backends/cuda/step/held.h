// Members of Consumer (step.cu): the first tile of a warp's next product with codes, taken out of the ring before
// the inputs have arrived, if it is there: while the warp waits for them, another tile is copied in its place.
// The tests of its stage are not ambiguous: the warp has had a tile of the round before the last at least.
constexpr static int HELD_RUNS = max_int(max_int(cut_of(0).blocks, cut_of(1).blocks), cut_of(3).blocks) * 128 / RUN;
#ifndef HOLD
#define HOLD 1
#endif
constexpr static bool HOLDS = HOLD && STAGES >= 3 * TEAMS - 2 && HELD_RUNS <= 8;

struct Held {
    Four rows[HELD_RUNS][2];
    u32 scales[HELD_RUNS];
    bool is_there;
    int runs, slice;
};

FN_MEMBER void hold(int part, Held& held) const {
    const Cut cut = cut_of(part);
    int begin = first;
    const int count = take(begin, cut.items).count, parts = min_int(cut.slices, TEAMS);
    const int own = (warp() + TEAMS - next % TEAMS) % TEAMS, item = own / parts, stage_runs = cut.blocks * 128 / RUN;
    const int number = next + item * cut.slices + own % parts, stage = number % STAGES, round = number / STAGES;
    held.slice = own % parts;
    held.is_there = item < count && (!round || mbarrier_is_past(empty(stage), (round - 1) & 1))
        && mbarrier_is_past(full(stage), round & 1);
    held.is_there = ballot(held.is_there) == ~0u;  // all lanes have seen that it is there
    if (!held.is_there) return;
    held.runs = max_int(0, min_int(stage_runs, cut.k / RUN - held.slice * stage_runs));
    const int box = box_bytes(cut.blocks);
    const u8* from = shared() + stage * STAGE;
    const u8* codes = from + code_row() * 128 + swizzled(code_row(), 4 * member() + lane() % 4);
    const u8* scales = from + 2 * box + member() * 32 + code_row() * 4;
    UNROLL for (int run = 0; run < HELD_RUNS; ++run) {     // of all runs, also where a slice has fewer
        UNROLL for (int r = 0; r < 2; ++r) held.rows[run][r] = load4(codes + r * box + run * 1024);
        if (CODES == 1) held.scales[run] = *(const u32*)(scales + run * 64);
    }
    sync_warp();
    if (lane() == 0 && !*lost()) mbarrier_arrive(empty(stage));
}

// What `multiply_codes` does, of a tile that is held
FN_MEMBER static void multiply_held(const Held& held, int part, const u8* x, const float* scales_of_x, float (&sum)[COLUMNS][2]) {
    const Cut cut = cut_of(part);
    const int column = lane() / 4, t = lane() % 4;
    const float* by = scales_of_x + held.slice * cut.blocks + (CODES == 1 ? member() : 0);
    x += held.slice * (cut.blocks * 256) + member() * RUN + (CODES == 1 ? column % 2 * 64 + t * 16 : t * 32);
    UNROLL for (int run = 0; run < HELD_RUNS; ++run) {
        if (run >= held.runs) continue;
        Operands half;
        u32 a[4][4];
        UNROLL for (int r = 0; r < 2; ++r) half.rows[r] = held.rows[run][r];
        half.decoded(a);
        const u32 row_scales = CODES == 1 ? held.scales[run] : 0x3F803F80u;
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
            half.x[c][0] = half.x[c][1] = {0, 0, 0, 0};
            if (8 * c + column < 2 * BATCH)
                UNROLL for (int r = 0; r < 2; ++r)
                    half.x[c][r] = load4(x + (4 * c + column / 2) * (2 * cut.k) + run * (2 * RUN) + r * (CODES == 1 ? 128 : 16));
            float product[2];
            multiply_half(a, half.x[c], product);
            const float x_scale = by[min_int(4 * c + t, BATCH - 1) * (cut.k / 128) + run * (RUN / 128)];
            sum[c][0] += product[0] * (x_scale * low(row_scales));
            sum[c][1] += product[1] * (x_scale * high(row_scales));
        }
    }
}
