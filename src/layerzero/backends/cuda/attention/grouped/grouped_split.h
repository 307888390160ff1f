// Which keys a block of grouped.cu or grouped_wgmma.cu processes, and for which rows. Include
// grouped_items.h first.
#pragma once

struct Split {
    int count;                                     // items of this pass
    Item item;                                     // of this thread, and the keys that it sees
    Range keys;
    int begin, stop;                               // keys of this block
};

struct Shared {                                    // what threads tell each other
    i32 lowest, highest;                           // of the keys of all items of this pass
    i32 cut[2];                                    // begin and end of this split
    i32 used;                                      // columns
};

// Cuts the keys where the cost reaches split / splits of the total. All blocks compute the same costs,
// which do not decrease from thread to thread, as rounding keeps the order. `costs`: CUTTERS + 1.
FN Split split_keys(const Params& p, const Workspace& workspace, Span* spans, float* costs, Shared* shared, int split,
                    int kv_head, int pass) {
    constexpr int CUTTERS = THREADS < 128 ? THREADS : 128;                     // threads that compute costs
    // The items of this pass, one for each thread.
    const int count = (p.count - pass + p.passes - 1) / p.passes;
    const Item item = thread() < count ? item_of(p, index_of(p, pass, thread())) : Item{};
    const Range keys = keys_of(p, item);
    if (thread() < count) spans[thread()] = Span{keys.begin, keys.end, 0, keys.begin < keys.end ? item.n * GROUP : 0};
    sync_block();
    int fresh = keys.begin, lowest = PAST_KEYS, highest = 0;
    if (warp() * 32 < count)
        for (int n = 0; n < count; ++n) {
            const Span other = spans[n];
            if (other.low < keys.begin || (other.low == keys.begin && n < thread())) fresh = max_int(fresh, other.high);
            if (other.low < other.high) lowest = min_int(lowest, other.low), highest = max_int(highest, other.high);
        }
    sync_block();
    if (thread() < count) spans[thread()].fresh = min_int(fresh, keys.end);
    if (thread() == 0) {
        shared->lowest = highest ? lowest / KEYS * KEYS : 0;
        shared->highest = highest;
        costs[0] = 0;
    }
    sync_block();

    lowest = shared->lowest, highest = shared->highest;
    const int grain = (highest - lowest + CUTTERS * KEYS - 1) / (CUTTERS * KEYS) * KEYS;
    const int grain_begin = lowest + thread() * grain;
    if (thread() < CUTTERS) {
        float cost = 0;                            // of all keys up to the end of this thread's grain
        for (int n = 0; n < count; ++n) {
            const Span span = spans[n];
            const int end = min_int(grain_begin + grain, span.high);
            cost += (float)span.rows * max_int(end - span.low, 0) + (float)p.weight * max_int(end - span.fresh, 0);
        }
        costs[thread() + 1] = cost;
    }
    if (thread() < 2) shared->cut[thread()] = split + thread() == p.splits ? highest : lowest;
    sync_block();
    if (thread() < CUTTERS)
        UNROLL for (int n = 0; n < 2; ++n) {
            const float before = costs[thread()], after = costs[thread() + 1];
            const float target = costs[CUTTERS] * (split + n) / p.splits;
            if (before < target && target <= after && split + n < p.splits)
                shared->cut[n] = grain_begin + ((int)((target - before) * grain / (after - before)) + KEYS - 1) / KEYS * KEYS;
        }
    sync_block();
    if (kv_head == 0 && thread() < 2 && (thread() == 0 || split + 1 == p.splits))
        workspace.cuts[pass * (p.splits + 1) + split + thread()] = shared->cut[thread()];
    return Split{count, item, keys, shared->cut[0], shared->cut[1]};
}

// Lists the rows of the items that see a key of this block, by descending end, and returns their number.
FN int list_columns(const Params& p, const Split& work, const Span* spans, Column* columns, Shared* shared, int pass) {
    if (warp() * 32 < work.count) {
        int used = 0, column = 0;
        for (int n = 0; n < work.count; ++n) {
            const Span span = spans[n];
            const int rows = max_int(span.low, work.begin) < min_int(span.high, work.stop) ? span.rows : 0;
            used += rows;
            if (span.high > work.keys.end || (span.high == work.keys.end && n < thread())) column += rows;
        }
        if (thread() == 0) shared->used = used;
        if (max_int(work.keys.begin, work.begin) < min_int(work.keys.end, work.stop)) {
            const int row = index_of(p, pass, thread()) * p.max_queries * GROUP;
            ROLLED for (int n = 0; n < work.item.n * GROUP; ++n) {
                const Range seen = keys_of(p, work.item, n / GROUP);
                columns[column + n] = Column{max_int(seen.begin, work.begin), min_int(seen.end, work.stop),
                                             work.item.first + n / GROUP, row + n};
            }
        }
    }
    sync_block();
    return shared->used;
}

// Moves x, past `until`, to the next key that some item sees, and `until` to where the longest such item ends.
FN void seek(const Span* spans, int count, int& x, int& until) {
    if (x < until) return;
    int next = PAST_KEYS;
    ROLLED for (int n = lane(); n < count; n += 32)
        if (spans[n].high > x) next = min_int(next, max_int(spans[n].low, x));
    x = -warp_max(-next);
    int furthest = 0;
    ROLLED for (int n = lane(); n < count; n += 32)
        if (spans[n].low <= x && spans[n].high > x) furthest = max_int(furthest, spans[n].high);
    until = warp_max(furthest);
}
