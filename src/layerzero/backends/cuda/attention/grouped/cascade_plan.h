// Plans a call of cascade.cu: which items are processed together, over which keys. Include
// cascade_items.h first. Macros: those of cascade.cu, and PLANNERS (threads).
#pragma once

struct Entry {                                     // items that see much the same keys; it is cut into units
    i32 begin, end, row, first, members;           // as those of Unit
    i32 place;                                     // which of the members' places it is
    i32 unit, units, part;                         // its first unit, their number, and the first unit's part
};

// How many leading pages of each sequence are those of the one before: a warp each.
FN void compare(const Params& p, i32* common) {
    constexpr int AHEAD = 20;                      // pages that a lane loads before it compares one
    ROLLED for (int index = warp(); index < p.count; index += PLANNERS / 32) {
        const i32* const row = p.table + offset64(index, p.table_row);
        const i32* const lengths = p.lengths + index;
        const i64 before = index ? -(i64)p.table_row : 0;
        int differs = PAST_KEYS, full = PAST_KEYS;
        ROLLED for (int base = 0; base < full && differs == PAST_KEYS; base += 32 * AHEAD) {
            i32 here[AHEAD], there[AHEAD];
            UNROLL for (int n = 0; n < AHEAD; ++n) {
                const i32* at = row + max_int(min_int(base + n * 32 + lane(), p.max_pages - 1), 0);
                here[n] = at[0];
                there[n] = at[before];
            }
            full = index ? min_int(min_int(lengths[0], lengths[-1]) / PAGE, p.max_pages) : 0;
            UNROLL for (int n = 0; n < AHEAD; ++n)
                if (here[n] != there[n]) differs = min_int(differs, base + n * 32 + lane());
            differs = -warp_max(-differs);
        }
        if (lane() == 0) common[index] = min_int(differs, full);
    }
}

// Joins sequences to runs that share leading pages, extended while that saves more reads. Returns how many runs there
// are; `leaders` gets their first sequences and may be `common`, `pages` what each shares.
FN int join(const Params& p, const i32* common, i32* leaders, i32* pages) {
    constexpr int FEWEST = 64;                     // shared keys that are worth an entry
    int runs = 0, next = 0, ahead = 0;
    ROLLED while (next < p.count) {
        const int leader = next++;
        int shared_pages = 0;
        if (leader == 0) ahead = next < p.count ? common[next] : 0;
        ROLLED for (; next < p.count; ++next) {
            const int others = next - leader, fewer = others == 1 ? ahead : min_int(shared_pages, ahead);
            if (fewer * PAGE < FEWEST || (i64)fewer * others < (i64)shared_pages * (others - 1)) break;
            shared_pages = fewer;
            ahead = next + 1 < p.count ? common[next + 1] : 0;
        }
        // `next` is a leader now, and what it shares with the one before it counts no more
        ahead = next + 1 < p.count ? common[next + 1] : 0;
        leaders[runs] = leader;
        pages[runs++] = shared_pages;
    }
    return runs;
}

// One block.
KERNEL(plan, Params, PLANNERS)
{
    const Workspace workspace = workspace_of(p);
    u64* const cost = (u64*)shared();              // of all entries
    i32* const runs = (i32*)(cost + 1);            // how many
    Range* const seen = (Range*)(cost + 2);        // of each item
    i32* const common = (i32*)(seen + p.count);    // leading pages that are those of the sequence before; then leaders
    i32* const pages = common + p.count;           // that a run shares
    Entry* const entries = (Entry*)(pages + p.count);  // PLACES of each item; those of a run begin with its leader's
    const int item_rows = p.max_queries * GROUP, limit = MAX_COLUMNS / item_rows;
    if (thread() == 0) *cost = 0;
    ROLLED for (int n = thread(); n < p.tokens; n += PLANNERS) workspace.item_of_token[n] = -1;
    ROLLED for (int n = thread(); n < PLACES * p.count; n += PLANNERS) entries[n] = Entry{};
    compare(p, common);
    ROLLED for (int n = thread(); n < p.count; n += PLANNERS) seen[n] = keys_of(p, item_of(p, n));
    sync_block();
    if (thread() == 0) *runs = join(p, common, common, pages);
    ROLLED for (int n = thread(); n < p.count; n += PLANNERS) {
        const Item item = item_of(p, n);
        for (int i = 0; i < item.n; ++i) workspace.item_of_token[item.first + i] = n;
    }
    sync_block();

    // Entries: what a run shares, for as many members at once as rows fit, then what each has of its own.
    ROLLED for (int run = warp(); run < *runs; run += PLANNERS / 32) {
        const int leader = common[run], next = run + 1 < *runs ? common[run + 1] : p.count, together = pages[run] * PAGE;
        int at = leader * PLACES;
        u64 sum = 0;
        ROLLED for (int first = leader; together && first < next; first += limit) {
            const int members = min_int(limit, next - first);
            Range keys = {PAST_KEYS, 0};
            for (int n = first + lane(); n < first + members; n += 32)
                if (seen[n].begin < min_int(seen[n].end, together)) {
                    keys.begin = min_int(keys.begin, seen[n].begin);
                    keys.end = max_int(keys.end, min_int(seen[n].end, together));
                }
            keys = Range{-warp_max(-keys.begin), warp_max(keys.end)};
            if (lane() == 0) {
                entries[at] = Entry{keys.begin, keys.end, leader, first, members, 0, 0, 0, 0};
                sum += (u64)max_int(keys.end - keys.begin, 0) * (p.weight + members * item_rows);
            }
            ++at;
        }
        for (int n = leader + lane(); n < next; n += 32) {
            const int begin = max_int(seen[n].begin, together);
            entries[at + n - leader] = Entry{begin, seen[n].end, n, n, 1, 1, 0, 0, 0};
            sum += (u64)max_int(seen[n].end - begin, 0) * (p.weight + item_rows);
            if (!together) workspace.places[n * PLACES] = Place{0, 0, 0};
        }
        sum = warp_sum(sum);
        if (lane() == 0) atomic_add(cost, sum);
    }
    sync_block();

    // Each entry has as many units as its cost is of a block's share; entries are numbered one after the other.
    if (warp() == 0) {
        const float target = fmaxf((float)*cost * p.kv_heads / p.blocks, 1.0f);
        int unit = 0, part = 0;
        ROLLED for (int base = 0; base < PLACES * p.count; base += 32) {
            Entry* const entry = entries + base + lane();
            int units = 0, rows = 0;
            if (base + lane() < PLACES * p.count) {
                const int keys = max_int(entry->end - entry->begin, 0);
                rows = entry->members * item_rows;
                units = keys ? (int)((float)keys * (p.weight + rows) / target * 0.99999f) + 1 : 0;
                units = min_int(units, (keys + 2 * STEP - 1) / (2 * STEP));
            }
            int last_unit = units, last_part = units * rows;                   // inclusive sums
            UNROLL for (int n = 1; n < 32; n *= 2) {
                const int u = shuffle(last_unit, lane() - n), r = shuffle(last_part, lane() - n);
                if (lane() >= n) last_unit += u, last_part += r;
            }
            if (base + lane() < PLACES * p.count)
                entry->unit = unit + last_unit - units, entry->units = units, entry->part = part + last_part - units * rows;
            unit += shuffle(last_unit, 31);
            part += shuffle(last_part, 31);
        }
        if (lane() == 0) *workspace.unit_count = unit;
    }
    sync_block();
    ROLLED for (int at = warp(); at < PLACES * p.count; at += PLANNERS / 32) {
        const Entry entry = entries[at];
        const int keys = entry.end - entry.begin;
        const int each = entry.units ? round_up((keys + entry.units - 1) / entry.units, KEYS) : 0;
        ROLLED for (int n = lane(); n < entry.units; n += 32)
            workspace.units[entry.unit + n] = Unit{
                entry.begin + min_int(n * each, keys), entry.begin + min_int((n + 1) * each, keys), entry.row, entry.first,
                entry.members, entry.part + n * entry.members * item_rows, {0, 0}};
        ROLLED for (int n = lane(); n < entry.members; n += 32)
            workspace.places[(entry.first + n) * PLACES + entry.place] = Place{entry.unit, entry.units, n};
    }
}
