// grouped.cu for many rows, by the products of products.h, which says what the macros are; the others
// are those of grouped.cu.
#define SPLITS 1                                   // of combine.h: blocks are no clusters
#include "device.h"
#include "wgmma.h"
#include "combine.h"
#include "tiles.h"
#include "items.h"
#include "grouped_items.h"
#include "grouped_split.h"
#include "grouped_parts.h"
#include "products.h"

KERNEL(grouped, Params, WARPS * 32)
{
    u8* const ring = aligned_shared();
    Span* const spans = (Span*)(ring + RING + QUERIES);                        // MAX_COLUMNS
    Column* const columns = (Column*)(spans + MAX_COLUMNS);                    // MAX_COLUMNS
    Range* const steps = (Range*)(columns + MAX_COLUMNS);  // STAGES
    Shared* const shared_facts = (Shared*)(steps + STAGES);
    const int split = block_x(), kv_head = block_y(), pass = block_z();
    const int unit = thread() % UNITS, row_in_copy = thread() / UNITS;
    const Workspace workspace = workspace_of(p);

    const Split work = split_keys(p, workspace, spans, (float*)ring, shared_facts, split, kv_head, pass);
    const int count = work.count, stop = work.stop;
    if (work.begin >= stop) return;

    // Steps of keys, each of which some item sees, are copied ahead.
    int x = work.begin, until = x;                 // the next key; one item covers [x, until)
    int filled = 0;                                // the stage that is filled next
    const int copy_at = place_of(row_in_copy, unit, HALF);
    auto fetch = [&]() {                           // zeros past the last key of a tile
        if (x < stop) seek(spans, count, x, until);
        const int end = x < stop ? min_int(min_int(x + STEP, until), stop) : x;
        if (thread() == 0) steps[filled] = Range{x, end};
        const u16* const k = p.k + offset64(kv_head, p.k_head) + offset64(x + row_in_copy, K_TOKEN) + unit * 8;
        const u16* const v = p.v + offset64(kv_head, p.v_head) + offset64(x + row_in_copy, V_TOKEN) + unit * 8;
        u8* const to = ring + filled * STAGE + copy_at;
        UNROLL for (int n = 0; n < STEP; n += COPIED)
            if (x + n / TILE * TILE < end) {
                const bool real = x + n + row_in_copy < end;
                copy_async(to + n * 128, k + (i64)n * K_TOKEN, real);
                copy_async(to + n * 128 + HALF_STAGE, v + (i64)n * V_TOKEN, real);
            }
        copy_commit();
        filled = filled == STAGES - 1 ? 0 : filled + 1;
        x = end;
    };
    ROLLED for (int n = 0; n < STAGES - 1; ++n) fetch();

    const int used = list_columns(p, work, spans, columns, shared_facts, pass);
    Products a = load_queries(ring, columns, used, [&](int at) {
        return p.q + offset64(columns[at].token, p.q_token) + offset64(kv_head * GROUP + columns[at].row % GROUP, p.q_head);
    });
    ROLLED for (int stage = 0;; stage = stage == STAGES - 1 ? 0 : stage + 1) {
        copy_wait<STAGES - 2>();
        show_to_wgmma();
        sync_block();                              // this stage has arrived, and the one before it is read
        const Range step = steps[stage];
        if (step.begin >= step.end) break;
        fetch();
        attend_step(p, a, columns, stage, step);
    }
    copy_wait<0>();
    sync_block();
    store_part(a, ring);
    store_parts(workspace, ring, used, a.row_groups * 4, [](int at) { return warp_row(at); },
                [&](int at) { return part_of(p, workspace.rows, split, columns[at].row, kv_head); });
}
