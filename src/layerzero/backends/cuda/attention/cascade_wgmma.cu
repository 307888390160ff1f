// cascade.cu by the products of products.h, which says what the macros are; the others are those of cascade.cu.
// RESIDENT blocks run on a multiprocessor at once, so that one reads while another begins or ends.
#define SPLITS 1                                   // of combine.h: blocks are no clusters
#include "device.h"
#include "wgmma.h"
#include "combine.h"
#include "tiles.h"
#include "items.h"
#include "cascade_items.h"
#include "cascade_plan.h"
#include "cascade_parts.h"
#include "products.h"

static_assert(PRODUCTS == 1, "rows are in no order by their end");
static_assert(COPIED % KEYS == 0 || KEYS % COPIED == 0, "what is copied together lies in one page");

KERNEL(attend, Params, RESIDENT * WARPS * 32)      // leaves registers for as many
{
    u8* const ring = aligned_shared();
    Column* const columns = (Column*)(ring + RING + QUERIES);                  // MAX_COLUMNS
    i32* const last = (i32*)(columns + MAX_COLUMNS);
    const Workspace workspace = workspace_of(p);
    const int kv_head = block_x(), unit_in_row = thread() % UNITS, row_in_copy = thread() / UNITS;
    let_next_begin();
    wait_for_previous();
    const Unit unit = workspace.units[block_y()];
    if (block_y() >= *workspace.unit_count || unit.begin >= unit.end) return;

    int x = unit.begin, filled = 0;                // the next key, and the stage that is filled next
    const i32* const pages = p.table + offset64(unit.row, p.table_row);
    auto page_at = [&](int key) { return key < unit.end ? pages[key / PAGE] : 0; };
    int ahead = page_at(x + lane() * KEYS);        // the pages of the next keys, one of each lane
    const int copy_at = place_of(row_in_copy, unit_in_row, HALF);
    auto fetch = [&]() {                           // zeros past the last key of a tile
        const int here = ahead;
        ahead = lane() < STEP / KEYS ? page_at(x + STEP + lane() * KEYS) : 0;
        const u16* const k = p.k + offset64(kv_head, p.k_head) + unit_in_row * 8;
        const u16* const v = p.v + offset64(kv_head, p.v_head) + unit_in_row * 8;
        u8* const to = ring + filled * STAGE + copy_at;
        UNROLL for (int n = 0; n < STEP; n += COPIED) {
            const int row = n + row_in_copy, page = shuffle(here, row / KEYS), slot = (x + row) % PAGE;
            if (x + n / TILE * TILE < unit.end) {
                const bool real = x + row < unit.end;
                copy_async(to + n * 128, k + offset64(page, p.k_page) + slot * K_TOKEN, real);
                copy_async(to + n * 128 + HALF_STAGE, v + offset64(page, p.v_page) + slot * V_TOKEN, real);
            }
        }
        copy_commit();
        filled = filled == STAGES - 1 ? 0 : filled + 1;
        x += STEP;
    };
    ROLLED for (int n = 0; n < STAGES - 1; ++n) fetch();

    const int used = list_columns(p, unit, columns, last);
    Products a = load_queries(ring, columns, used, [&](int at) {
        return columns[at].high ? p.q + offset64(columns[at].token, p.q_token)
                                  + offset64(kv_head * GROUP + at % GROUP, p.q_head) : nullptr;
    });
    int stage = 0;
    ROLLED for (int base = unit.begin; base < unit.end; base += STEP) {
        copy_wait<STAGES - 2>();
        show_to_wgmma();
        sync_block();                              // this stage has arrived, and the one before it is read
        fetch();
        attend_step(p, a, columns, stage, Range{base, min_int(base + STEP, unit.end)});
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    copy_wait<0>();
    sync_block();
    store_part(a, ring);
    store_parts(p, workspace, ring, unit, used, a.row_groups * 4, kv_head, [](int at) { return warp_row(at); });
}
