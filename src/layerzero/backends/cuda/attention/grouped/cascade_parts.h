// The rows of a unit of cascade.cu, and how the parts of a row are added up. Include cascade_items.h first.
#pragma once

// Lists the rows of a unit's items, one for each thread, and the keys that they see here. Returns one past the last
// that sees any. `last`: one past the last of each warp.
FN int list_columns(const Params& p, const Unit& unit, Column* columns, i32* last) {
    const int item_rows = p.max_queries * GROUP, member = thread() / item_rows, query = thread() % item_rows / GROUP;
    Column own = {0, 0, 0, 0};
    if (member < unit.members) {
        const Item item = item_of(p, unit.first + member);
        const Range seen = keys_of(p, item, query);
        if (query < item.n)
            own = Column{max_int(seen.begin, unit.begin), min_int(seen.end, unit.end), item.first + query, 0};
    }
    if (own.low >= own.high) own.low = own.high = 0;
    if (thread() < MAX_COLUMNS) columns[thread()] = own;
    const u32 seeing = ballot(own.high > 0);
    if (lane() == 0) {
        int past = 0;
        while (past < 32 && seeing >> past) ++past;
        last[warp()] = seeing ? warp() * 32 + past : 0;
    }
    sync_block();
    int used = 0;
    UNROLL for (int n = 0; n < WARPS; ++n) used = max_int(used, last[n]);
    return used;
}

// Adds up the parts of a row: a warp for each token and head.
KERNEL(merge, Params, WARPS * 32)
{
    const int head = block_x() * WARPS + warp(), token = block_y(), heads = p.kv_heads * GROUP;
    if (head >= heads) return;
    constexpr int QUADS = DIM / 4, PER_LANE = (QUADS + 31) / 32, AHEAD = 8;
    const Workspace workspace = workspace_of(p);
    float top = NONE, sum = 0, out[PER_LANE][4] = {};
    const int index = workspace.item_of_token[token];
    const Item item = index < 0 ? Item{} : item_of(p, index);
    const Range keys = keys_of(p, item, token - item.first);
    Place places[PLACES];
    UNROLL for (int n = 0; n < PLACES; ++n) places[n] = index < 0 ? Place{} : workspace.places[index * PLACES + n];
    const int units = places[0].units + places[1].units;
    ROLLED for (int first = 0; first < units; first += 32) {
        const int each = first + lane();
        const bool shared_one = each < places[0].units;
        const Place place = shared_one ? places[0] : places[1];
        const Unit unit = each < units ? workspace.units[place.unit + each - (shared_one ? 0 : places[0].units)] : Unit{};
        const bool seen = max_int(keys.begin, unit.begin) < min_int(keys.end, unit.end);
        const int column = (place.slot * p.max_queries + token - item.first) * GROUP + head % GROUP;
        const i64 row = (i64)(unit.part + column) * p.kv_heads + head / GROUP;
        const Float2 stats = seen ? workspace.stats[row] : Float2{NONE, 0};
        const float higher = fmaxf(top, warp_max(stats.x)), old = fast_exp2(top - higher);
        const float share = seen ? fast_exp2(stats.x - higher) : 0.0f;
        top = higher;
        sum = sum * old + warp_sum(share * stats.y);
        UNROLL for (int i = 0; i < PER_LANE; ++i)
            UNROLL for (int e = 0; e < 4; ++e) out[i][e] *= old;
        ROLLED for (u32 left = ballot(seen); left;) {
            float weights[AHEAD];
            const float* from[AHEAD];
            int at = 0;
            UNROLL for (int a = 0; a < AHEAD; ++a) {           // where none is left, the last is read again and counts nothing
                const bool real = left != 0;
                if (real) at = lowest_bit(left);
                left &= left - 1;
                weights[a] = shuffle(share, at) * (real ? 1.0f : 0.0f);
                from[a] = workspace.parts + shuffle(row, at) * DIM;
            }
            UNROLL for (int a = 0; a < AHEAD; ++a)
                UNROLL for (int i = 0; i < PER_LANE; ++i) {
                    const Four values = load4(from[a] + (i * 32 + lane() % QUADS) * 4);
                    out[i][0] += weights[a] * bits_float(values.x);
                    out[i][1] += weights[a] * bits_float(values.y);
                    out[i][2] += weights[a] * bits_float(values.z);
                    out[i][3] += weights[a] * bits_float(values.w);
                }
        }
    }
    const float by = sum > 0 ? reciprocal(sum) : 0.0f;
    const i64 row = (i64)token * heads + head;
    UNROLL for (int i = 0; i < PER_LANE; ++i)
        if (i * 32 + lane() < QUADS) {
            u32* to = (u32*)(p.out + row * DIM + (i * 32 + lane()) * 4);
            to[0] = pack2<BF16>(out[i][0] * by, out[i][1] * by);
            to[1] = pack2<BF16>(out[i][2] * by, out[i][3] * by);
        }
    if (p.lse && lane() == 0)
        p.lse[row] = sum > 0 ? (top + fast_log2(sum)) * 0.6931471805599453f : -bits_float(0x7F800000);
}
