// Plans a call of cascade.cu: which items are processed together, over which keys. Include
// cascade_items.h first. Macros: those of cascade.cu, and PLANNERS (threads).
#pragma once

// How many leading pages of each sequence are those of the one before: a warp each.
FN void compare(const Params& p, i32* common) {
    constexpr int AHEAD = 8;
    ROLLED for (int index = warp(); index < p.count; index += PLANNERS / 32) {
        const int keys = index ? min_int(p.lengths[index], p.lengths[index - 1]) : 0;
        const int full = min_int(keys / PAGE, p.max_pages);
        const i32* row = p.table + offset64(index, p.table_row);
        int differs = PAST_KEYS;
        ROLLED for (int base = 0; base < full && differs == PAST_KEYS; base += 32 * AHEAD) {
            i32 here[AHEAD], before[AHEAD];        // all are loaded before one is compared
            UNROLL for (int n = 0; n < AHEAD; ++n) {
                const i32* at = row + min_int(base + n * 32 + lane(), full - 1);
                here[n] = at[0];
                before[n] = at[-p.table_row];
            }
            UNROLL for (int n = 0; n < AHEAD; ++n)
                if (here[n] != before[n]) differs = min_int(differs, base + n * 32 + lane());
            differs = -warp_max(-differs);
        }
        if (lane() == 0) common[index] = min_int(differs, full);
    }
}

// Calls add(keys, table row, first item, items, place) for each entry: runs of sequences that share
// leading pages, extended while that saves more reads, as many at once as rows fit; then the other
// pages of each sequence.
template <typename Add>
FN void group_items(const Params& p, const Range* seen, const i32* common, Add add) {
    const int limit = MAX_COLUMNS / (p.max_queries * GROUP);
    constexpr int FEWEST = 64;                     // shared keys that are worth an entry
    ROLLED for (int leader = 0, next; leader < p.count; leader = next) {
        int pages = 0;
        for (next = leader + 1; next < p.count; ++next) {
            const int others = next - leader, fewer = others == 1 ? common[next] : min_int(pages, common[next]);
            if (fewer * PAGE < FEWEST || (i64)fewer * others < (i64)pages * (others - 1)) break;
            pages = fewer;
        }
        const int together = pages * PAGE;
        ROLLED for (int first = leader; pages && first < next; first += limit) {
            const int members = min_int(limit, next - first);
            Range keys = {PAST_KEYS, 0};
            for (int n = first; n < first + members; ++n)
                if (seen[n].begin < min_int(seen[n].end, together)) {
                    keys.begin = min_int(keys.begin, seen[n].begin);
                    keys.end = max_int(keys.end, min_int(seen[n].end, together));
                }
            add(keys, leader, first, members, 0);
        }
        for (int n = leader; n < next; ++n) add(Range{max_int(seen[n].begin, together), seen[n].end}, n, n, 1, 1);
    }
}

FN i64 most64(i64 a, i64 b) { return a > b ? a : b; }

// One block.
KERNEL(plan, Params, PLANNERS)
{
    const Workspace workspace = workspace_of(p);
    i64* const target = (i64*)shared();            // the cost of a unit
    i32* const entries = (i32*)(target + 1);       // how many
    Range* const seen = (Range*)(target + 2);      // of each item
    i32* const common = (i32*)(seen + p.count);    // leading pages that are those of the sequence before
    const int item_rows = p.max_queries * GROUP;
    ROLLED for (int n = thread(); n < p.tokens; n += PLANNERS) workspace.item_of_token[n] = -1;
    ROLLED for (int n = thread(); n < p.count; n += PLANNERS) seen[n] = keys_of(p, item_of(p, n));
    compare(p, common);
    sync_block();
    ROLLED for (int n = thread(); n < p.count; n += PLANNERS) {
        const Item item = item_of(p, n);
        for (int i = 0; i < item.n; ++i) workspace.item_of_token[item.first + i] = n;
        for (int i = 0; i < PLACES; ++i) workspace.places[n * PLACES + i] = Place{0, 0, 0};
    }
    sync_block();
    if (thread() == 0) {
        int count = 0;
        i64 cost = 0;
        group_items(p, seen, common, [&](Range keys, int row, int first, int members, int place) {
            if (keys.begin >= keys.end) return;
            const i64 own = (i64)(keys.end - keys.begin) * (p.weight + members * item_rows);
            workspace.entries[count++] = Entry{keys.begin, keys.end, row, first, members, place, own};
            cost += own;
        });
        *entries = count;
        *target = most64((cost * p.kv_heads + p.blocks - 1) / p.blocks, 1);
    }
    sync_block();
    if (warp() > 0) return;
    int unit = 0, part = 0;                        // of the entries before
    ROLLED for (int base = 0; base < *entries; base += 32) {
        Entry entry = {};
        int units = 0;
        if (base + lane() < *entries) {
            entry = workspace.entries[base + lane()];
            units = (int)((entry.cost + *target - 1) / *target);
            units = min_int(units, (entry.end - entry.begin + 2 * SPAN - 1) / (2 * SPAN));
        }
        const int rows = entry.members * item_rows;
        int last_unit = units, last_part = units * rows;                       // inclusive sums
        UNROLL for (int n = 1; n < 32; n *= 2) {
            const int u = shuffle(last_unit, lane() - n), r = shuffle(last_part, lane() - n);
            if (lane() >= n) last_unit += u, last_part += r;
        }
        const int first_unit = unit + last_unit - units, first_part = part + last_part - units * rows;
        int n = 0, begin = entry.begin;            // the next unit
        auto emit = [&](int end) {
            workspace.units[first_unit + n] = Unit{begin, end, entry.row, entry.first, entry.members,
                                                   first_part + n * rows, {0, 0}};
            begin = end;
            ++n;
        };
        const int each = p.weight + rows;          // the cost of a key
        ROLLED while (n + 1 < units) {
            const int keys = (int)(entry.cost * (n + 1) / units / each);
            emit(max_int(begin, min_int(entry.begin + round_up(keys, KEYS), entry.end)));
        }
        while (n < units) emit(entry.end);         // what is left; rounding may leave none to the last
        ROLLED for (int n = 0; n < entry.members; ++n)
            workspace.places[(entry.first + n) * PLACES + entry.place] = Place{first_unit, units, n};
        unit += shuffle(last_unit, 31);
        part += shuffle(last_part, 31);
    }
    if (lane() == 0) *workspace.unit_count = unit;
}
