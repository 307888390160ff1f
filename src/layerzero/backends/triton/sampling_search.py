"""lz.sample without a sort: the cut of the filters is found by a search.

A row is split into chunks, one program each, and every step is one launch over all chunks; the last
program of a row to finish combines the results of all and stores the decision for the next launch.

peak     the maximum, which scores are relative to
narrow   the mass and the number of tokens above each of seven scores, which bracket the cut. Two or
         three of these launches leave some hundred candidates of 128,000
draw     collects the candidates, finds the exact cut among them, and draws the token: first its
         tile, then its place in the tile

Tokens rank by (score, id) as one integer, the place: the bits of floats of one sign are ordered
like the floats, and the id breaks ties. A cut is the last place that is kept. Cut and draw use sums
in float64, as the contract says, and the exponential is torch's, so the tokens are those of every
other kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

MAX_LISTED = 2048         # candidates that draw_kernel can hold
MASS_ERROR = tl.constexpr(4e-6)                    # the relative error of a mass of narrow_kernel
ID_BITS = tl.constexpr(20)
ID_MASK = tl.constexpr((1 << 20) - 1)
LIST = tl.constexpr(MAX_LISTED)


@triton.jit
def _clean_values(value, PROBS: tl.constexpr):
    """Replaces NaN by an impossible value, and infinite logits by the largest number."""
    value = value.to(tl.float32)
    if PROBS:
        return tl.where((value > 0.0) & (value < float("inf")), value, 0.0)
    value = tl.where(value == value, value, float("-inf"))
    return tl.minimum(value, 3.4028234663852886e38)


@triton.jit
def _read_tokens(
    logits_ptr, id, vocab, peak, divisor, PROBS: tl.constexpr, SCALE: tl.constexpr,
    LIBDEVICE: tl.constexpr,
):
    """Loads (rank key, weight) of tokens `id`; keys rise as scores fall, the largest is never."""
    inside = id < vocab
    value = _clean_values(tl.load(logits_ptr + id, mask=inside, other=0.0 if PROBS
                                  else float("-inf")), PROBS)
    if PROBS:
        return 0x7FFFFFFF - value.to(tl.int32, bitcast=True), value
    score = value - tl.maximum(peak, -3.4028234663852886e38)
    if SCALE == 1:                                 # as torch divides by a scalar on a GPU
        score = score * divisor
    elif SCALE == 2:
        score = tl.div_rn(score, divisor)
    weight = libdevice.exp(score) if LIBDEVICE else tl.exp(score)
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF, weight


@triton.jit
def _is_last(count_ptr, row, chunks):
    """Returns whether this is the last program of its row, which can read all that was stored."""
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr + row, 1, sem="acq_rel") == chunks - 1
    if last:
        tl.store(count_ptr + row, 0)
    return last


@triton.jit(do_not_specialize=["limit"])
def peak_kernel(
    logits_ptr, part_ptr, peak_ptr, whole_ptr, listed_ptr, count_ptr, row_stride, vocab, limit,
    PROBS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):
    """Finds the maximum of each row, and initialises `whole` for narrow_kernel."""
    row, chunk, chunks = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    logits_ptr += row.to(tl.int64) * row_stride
    maximum = tl.full((TILE,), 0.0 if PROBS else float("-inf"), tl.float32)
    for first in tl.static_range(0, CHUNK, TILE):
        id = chunk * CHUNK + first + tl.arange(0, TILE)
        value = tl.load(logits_ptr + id, mask=id < vocab, other=0.0 if PROBS else float("-inf"))
        maximum = tl.maximum(maximum, _clean_values(value, PROBS))
    tl.store(part_ptr + row * chunks + chunk, tl.max(maximum, 0))
    if _is_last(count_ptr, row, chunks):
        c = tl.arange(0, CHUNKS)
        parts = tl.load(part_ptr + row * chunks + c, mask=c < chunks, other=float("-inf"),
                        cache_modifier=".cg")
        tl.store(peak_ptr + row, tl.max(parts, 0))
        tl.store(whole_ptr + row * 4, 0)
        tl.store(whole_ptr + row * 4 + 1, limit)
        tl.store(whole_ptr + row * 4 + 2, 0)
        tl.store(whole_ptr + row * 4 + 3, vocab)
        tl.store(listed_ptr + row, 0)


@triton.jit
def _edge(J: tl.constexpr, lo, hi, peak, FIRST: tl.constexpr, PROBS: tl.constexpr):
    """Returns where the J-th of eight parts of [lo, hi) begins: typical cuts, then even ones."""
    if FIRST:
        # 0.75, 2, 3.75, 6, 8.75, 12, 15.75 below the maximum
        depth = 0.25 * J * (J + 2)
        if PROBS:
            return 0x7FFFFFFF - (peak * tl.exp(-(peak * 0.0 + depth))).to(tl.int32, bitcast=True)
        return (peak * 0.0 + depth).to(tl.int32, bitcast=True)
    if PROBS:
        high_prob = (0x7FFFFFFF - lo).to(tl.float32, bitcast=True)
        low_prob = (0x7FFFFFFF - hi).to(tl.float32, bitcast=True)
        prob = high_prob - (high_prob - low_prob) * (0.125 * J)
        return tl.minimum(tl.maximum(0x7FFFFFFF - prob.to(tl.int32, bitcast=True), lo),
                          hi)
    low_score = lo.to(tl.float32, bitcast=True)
    high_score = tl.where(hi >= 0x7F800000, low_score + 64.0, hi.to(tl.float32, bitcast=True))
    score = low_score + (high_score - low_score) * (0.125 * J)
    return tl.minimum(tl.maximum(score.to(tl.int32, bitcast=True), lo), hi)


@triton.jit
def _add_before(key, weight, edge, mass, count, MASS: tl.constexpr):
    """Adds the mass and the number of this thread's tokens before the edge."""
    before = key < edge
    if MASS:
        mass += tl.sum(tl.sum(tl.where(before, weight, 0.0), 2), 0).to(tl.float64)
    count += tl.sum(tl.sum(before.to(tl.int32), 2), 0)
    return mass, count


@triton.jit
def _select_edge(n, e0, e1, e2, e3, e4, e5, e6):
    low = tl.where(n == 0, e0, tl.where(n == 1, e1, e2))
    return tl.where(n < 3, low,
                    tl.where(n == 3, e3, tl.where(n == 4, e4, tl.where(n == 5, e5, e6))))


@triton.jit
def _store_sums(mass_ptr, count_ptr, J: tl.constexpr, mass, count):
    tl.store(mass_ptr + J, tl.sum(mass, 0))
    tl.store(count_ptr + J, tl.sum(count, 0))


@triton.jit(do_not_specialize=["top_k"])
def narrow_kernel(
    logits_ptr, peak_ptr, part_mass_ptr, part_count_ptr, whole_ptr, total_ptr, count_ptr,
    row_stride, vocab, divisor, top_k, top_p: tl.float64,
    FIRST: tl.constexpr, BY_COUNT: tl.constexpr, PROBS: tl.constexpr, SCALE: tl.constexpr,
    LIBDEVICE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):
    """Narrows [lo, hi) to the one of its eight parts that holds the cut, by number or by mass.

    `whole` is (lo, hi, tokens before lo, tokens before hi). Masses are partly summed in float32, so
    if one is within its error of the target, the parts on both sides of the edge are kept. `total`
    is the mass of all, in float64.
    """
    row, chunk, chunks = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    lo, hi = tl.load(whole_ptr + row * 4), tl.load(whole_ptr + row * 4 + 1)
    above, reached = tl.load(whole_ptr + row * 4 + 2), tl.load(whole_ptr + row * 4 + 3)
    listed = reached
    if not BY_COUNT:
        listed -= above
    if FIRST or ((listed > LIST) & (hi - lo > 1)):
        mass: tl.constexpr = not BY_COUNT
        peak = tl.load(peak_ptr + row)
        e1, e2 = _edge(1, lo, hi, peak, FIRST, PROBS), _edge(2, lo, hi, peak, FIRST, PROBS)
        e3, e4 = _edge(3, lo, hi, peak, FIRST, PROBS), _edge(4, lo, hi, peak, FIRST, PROBS)
        e5, e6 = _edge(5, lo, hi, peak, FIRST, PROBS), _edge(6, lo, hi, peak, FIRST, PROBS)
        e7 = _edge(7, lo, hi, peak, FIRST, PROBS)
        # 3-D tiles (steps, threads, a vector of four), so that most of a sum is within a thread.
        threads: tl.constexpr = TILE // 4 if TILE <= 1024 else 256
        steps: tl.constexpr = TILE // (4 * threads)
        inner = (tl.arange(0, steps)[:, None, None] * threads
                 + tl.arange(0, threads)[None, :, None]) * 4 \
            + tl.arange(0, 4)[None, None, :]
        none, zero = tl.zeros((threads,), tl.float64), tl.zeros((threads,), tl.int32)
        m0, m1, m2, m3, m4, m5, m6, m7 = none, none, none, none, none, none, none, none
        c1, c2, c3, c4, c5, c6, c7 = zero, zero, zero, zero, zero, zero, zero
        for begin in range(0, CHUNK, TILE):
            key, weight = _read_tokens(logits_ptr + row.to(tl.int64) * row_stride,
                                       chunk * CHUNK + begin + inner, vocab, peak,
                                       divisor, PROBS, SCALE, LIBDEVICE)
            if FIRST and not BY_COUNT:
                m0 += tl.sum(tl.sum(weight.to(tl.float64), 2), 0)
            m1, c1 = _add_before(key, weight, e1, m1, c1, mass)
            m2, c2 = _add_before(key, weight, e2, m2, c2, mass)
            m3, c3 = _add_before(key, weight, e3, m3, c3, mass)
            m4, c4 = _add_before(key, weight, e4, m4, c4, mass)
            m5, c5 = _add_before(key, weight, e5, m5, c5, mass)
            m6, c6 = _add_before(key, weight, e6, m6, c6, mass)
            m7, c7 = _add_before(key, weight, e7, m7, c7, mass)
        masses, counts = part_mass_ptr + (row * chunks + chunk) * 8, part_count_ptr + (
            row * chunks + chunk) * 8
        _store_sums(masses, counts, 0, m0, zero)
        _store_sums(masses, counts, 1, m1, c1)
        _store_sums(masses, counts, 2, m2, c2)
        _store_sums(masses, counts, 3, m3, c3)
        _store_sums(masses, counts, 4, m4, c4)
        _store_sums(masses, counts, 5, m5, c5)
        _store_sums(masses, counts, 6, m6, c6)
        _store_sums(masses, counts, 7, m7, c7)
        if _is_last(count_ptr, row, chunks):
            j, n = tl.arange(0, 8), tl.arange(0, CHUNKS)
            offsets, valid = (row * chunks + n[:, None]) * 8 + j[None, :], n[:, None] < chunks
            edge_masses = tl.sum(tl.load(part_mass_ptr + offsets, mask=valid, other=0.0,
                                         cache_modifier=".cg"), 0)
            edge_counts = tl.sum(tl.load(part_count_ptr + offsets, mask=valid, other=0,
                                         cache_modifier=".cg"), 0)
            if BY_COUNT:
                # edges that are too early
                cut = tl.sum(((edge_counts < top_k) & (j > 0)).to(tl.int32), 0)
                last = cut
            else:
                if FIRST:
                    total = tl.sum(tl.where(j == 0, edge_masses, 0.0), 0)
                    tl.store(total_ptr + row, total)
                else:
                    total = tl.load(total_ptr + row)
                cut = tl.sum(((edge_masses < top_p * total * (1.0 - MASS_ERROR))
                              & (j > 0)).to(tl.int32), 0)
                last = tl.sum(((edge_masses < top_p * total * (1.0 + MASS_ERROR))
                               & (j > 0)).to(tl.int32), 0)
            tl.store(whole_ptr + row * 4,
                     tl.where(cut == 0, lo, _select_edge(cut - 1, e1, e2, e3, e4, e5, e6, e7)))
            tl.store(whole_ptr + row * 4 + 1,
                     tl.where(last == 7, hi, _select_edge(last, e1, e2, e3, e4, e5, e6, e7)))
            if cut > 0:
                tl.store(whole_ptr + row * 4 + 2, tl.sum(tl.where(j == cut, edge_counts, 0), 0))
            if last < 7:
                tl.store(whole_ptr + row * 4 + 3,
                         tl.sum(tl.where(j == last + 1, edge_counts, 0), 0))


@triton.jit
def _last_kept(place, weight, valid, lo, hi, above, target):
    """Returns the last place in [lo, hi) before which less than `target` lies, or one before the
    next candidate. `above` is what lies before lo. Bisects [lo, hi) until one candidate is left."""
    count = tl.sum((valid & (place >= lo) & (place < hi)).to(tl.int32), 0)
    while (count > 1) & (hi - lo > 1):
        middle = lo + (hi - lo) // 2
        if above + tl.sum(tl.where(valid & (place < middle), weight, 0.0), 0) < target:
            lo = middle
        else:
            hi = middle
        count = tl.sum((valid & (place >= lo) & (place < hi)).to(tl.int32), 0)
    return hi - 1


@triton.jit
def _cut_among_listed(
    list_ptr, weight_ptr, listed, by_tile, tile, begin, end, mass, total, top_k, top_p, least,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Returns (the last place kept, the mass of each tile) from the candidates alone."""
    i = tl.arange(0, LIST)
    valid = i < listed
    place = tl.load(list_ptr + i, mask=valid, other=0, cache_modifier=".cg")
    weight = tl.load(weight_ptr + i, mask=valid, other=0.0, cache_modifier=".cg").to(tl.float64)
    cut = end - 1
    if TOP_K:
        ones = tl.full((LIST,), 1.0, tl.float64)
        cut = _last_kept(place, ones, valid, begin, end, mass * 0.0, top_k.to(tl.float64))
        mass = mass * 0.0
        total = tl.sum(tl.where(valid & (place <= cut), weight, 0.0), 0)
    if TOP_P:
        cut = _last_kept(place, weight, valid, begin, cut + 1, mass, top_p * total)
    for first in range(0, listed, AT_ONCE):
        n = first + tl.arange(0, AT_ONCE)
        places = tl.load(list_ptr + n, mask=n < listed, other=0, cache_modifier=".cg")
        weights = tl.load(weight_ptr + n, mask=n < listed, other=0.0,
                          cache_modifier=".cg").to(tl.float64)
        kept = places <= cut
        if MIN_P:
            kept = kept & (weights >= least)
        in_tile = kept[:, None] & (((places & ID_MASK) // TILE).to(tl.int32)[:, None]
                                   == tile[None, :])
        by_tile += tl.sum(tl.where(in_tile, weights[:, None], 0.0), 0)
    return cut, by_tile


@triton.jit
def _mass_of_tile(
    logits_ptr, tile, vocab, peak, divisor, last, least, COUNT: tl.constexpr, MIN_P: tl.constexpr,
    PROBS: tl.constexpr, SCALE: tl.constexpr, LIBDEVICE: tl.constexpr, TILE: tl.constexpr,
):
    """Returns the mass of a tile up to the place `last`, or with COUNT the number of tokens."""
    id = tile * TILE + tl.arange(0, TILE)
    key, weight = _read_tokens(logits_ptr, id, vocab, peak, divisor, PROBS, SCALE, LIBDEVICE)
    mass = weight.to(tl.float64)
    counted = (((key.to(tl.int64) << ID_BITS) | id) <= last) & (id < vocab)
    if MIN_P:
        counted = counted & (mass >= least)
    if COUNT:
        mass = tl.full((TILE,), 1.0, tl.float64)
    return tl.sum(tl.where(counted, mass, 0.0), 0)


@triton.jit
def _last_kept_in_row(
    logits_ptr, vocab, peak, divisor, tiles, lo, hi, target, COUNT: tl.constexpr,
    PROBS: tl.constexpr, SCALE: tl.constexpr, LIBDEVICE: tl.constexpr, TILE: tl.constexpr,
):
    while hi - lo > 1:
        middle = lo + (hi - lo) // 2
        reached = target * 0.0
        for n in range(tiles):
            reached += _mass_of_tile(logits_ptr, n, vocab, peak, divisor, middle - 1, target, COUNT,
                                     False, PROBS, SCALE, LIBDEVICE, TILE)
        if reached < target:
            lo = middle
        else:
            hi = middle
    return lo


@triton.jit
def _cut_among_all(
    logits_ptr, vocab, peak, divisor, c, tiles, begin, end, total, top_k, top_p, least,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, PROBS: tl.constexpr,
    SCALE: tl.constexpr, LIBDEVICE: tl.constexpr, TILE: tl.constexpr,
):
    """Like _cut_among_listed, from the whole row, if thousands of scores are equal: slow."""
    cut = end - 1
    if TOP_K:
        cut = _last_kept_in_row(logits_ptr, vocab, peak, divisor, tiles, begin, end,
                                top_k.to(tl.float64), True, PROBS, SCALE, LIBDEVICE, TILE)
        total = total * 0.0
        for n in range(tiles):
            total += _mass_of_tile(logits_ptr, n, vocab, peak, divisor, cut, least, False, False,
                                   PROBS, SCALE, LIBDEVICE, TILE)
    if TOP_P:
        cut = _last_kept_in_row(logits_ptr, vocab, peak, divisor, tiles, begin, cut + 1,
                                top_p * total, False, PROBS, SCALE, LIBDEVICE, TILE)
    by_tile = (c * 0).to(tl.float64)
    for n in range(tiles):
        mass = _mass_of_tile(logits_ptr, n, vocab, peak, divisor, cut, least, False, MIN_P, PROBS,
                             SCALE, LIBDEVICE, TILE)
        by_tile = tl.where(c == n, mass, by_tile)
    return cut, by_tile


@triton.jit
def _uniform(uniform_ptr, row, word, SEEDED: tl.constexpr):
    """Returns the row's random number: given, or draw 0 of SplitMix64 at `word` + row * GOLDEN
    (formulas/sampling.py)."""
    if not SEEDED:
        return tl.load(uniform_ptr + row)
    x = word + row.to(tl.int64) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16


@triton.jit(do_not_specialize=["top_k", "word"])
def draw_kernel(
    logits_ptr, peak_ptr, whole_ptr, whole_mass_ptr, list_ptr, list_weight_ptr, listed_ptr,
    sure_ptr, before_ptr, count_ptr, uniform_ptr, token_ptr, chosen_ptr, total_ptr, row_stride,
    vocab, divisor, top_k, top_p: tl.float64, min_p: tl.float64, word: tl.int64,
    SEARCH: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
    SEEDED: tl.constexpr, PROBS: tl.constexpr, SCALE: tl.constexpr, LIBDEVICE: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Collects the candidates in [lo, hi), finds the cut, draws. TOP_K keeps only candidates."""
    row, chunk, chunks = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    lo, hi = tl.load(whole_ptr + row * 4), tl.load(whole_ptr + row * 4 + 1)
    inside = tl.load(whole_ptr + row * 4 + 3)
    peak = tl.load(peak_ptr + row)
    logits_ptr += row.to(tl.int64) * row_stride
    first = lo
    if TOP_K:
        first = lo * 0
    else:
        inside -= tl.load(whole_ptr + row * 4 + 2)
    tiles = tl.cdiv(vocab, TILE)
    largest = (peak.to(tl.float64) if PROBS
               else tl.where(peak == float("-inf"), 0.0, 1.0).to(tl.float64))
    least = min_p * largest
    for tile in range(chunk * (CHUNK // TILE), tl.minimum((chunk + 1) * (CHUNK // TILE), tiles)):
        id = tile * TILE + tl.arange(0, TILE)
        key, weight = _read_tokens(logits_ptr, id, vocab, peak, divisor, PROBS, SCALE, LIBDEVICE)
        kept_mass = weight.to(tl.float64)
        if SEARCH:
            kept_mass = tl.where(key < first, kept_mass, 0.0)
        if MIN_P:
            if SEARCH:
                # min_p applies after top_p
                tl.store(before_ptr + row * tiles + tile, tl.sum(kept_mass, 0))
            kept_mass = tl.where(kept_mass >= least, kept_mass, 0.0)
        tl.store(sure_ptr + row * tiles + tile, tl.sum(kept_mass, 0))
        if SEARCH:
            listed = (key >= first) & (key < hi)
            count = tl.sum(listed.to(tl.int32), 0)
            if (count > 0) & (inside <= LIST):
                slot = tl.atomic_add(listed_ptr + row, count) + tl.cumsum(listed.to(tl.int32),
                                                                          0) - 1
                tl.store(list_ptr + row * LIST + slot, (key.to(tl.int64) << ID_BITS) | id,
                         mask=listed)
                tl.store(list_weight_ptr + row * LIST + slot, weight, mask=listed)

    if _is_last(count_ptr, row, chunks):
        t = tl.arange(0, TILES)
        by_tile = tl.load(sure_ptr + row * tiles + t, mask=t < tiles, other=0.0,
                          cache_modifier=".cg")
        # the last place that is kept
        cut = (hi.to(tl.int64) << ID_BITS) - 1
        if SEARCH:
            begin, end = first.to(tl.int64) << ID_BITS, hi.to(tl.int64) << ID_BITS
            mass = tl.sum(by_tile, 0)
            if MIN_P:
                mass = tl.sum(tl.load(before_ptr + row * tiles + t, mask=t < tiles, other=0.0,
                                      cache_modifier=".cg"), 0)
            total = mass
            if not TOP_K:
                total = tl.load(whole_mass_ptr + row)
            if inside > LIST:
                cut, by_tile = _cut_among_all(
                    logits_ptr, vocab, peak, divisor, t, tiles, begin, end, total, top_k, top_p,
                    least, TOP_K, TOP_P, MIN_P, PROBS, SCALE, LIBDEVICE, TILE)
            else:
                cut, by_tile = _cut_among_listed(
                    list_ptr + row * LIST, list_weight_ptr + row * LIST,
                    tl.load(listed_ptr + row, cache_modifier=".cg"), by_tile, t, begin, end, mass,
                    total, top_k, top_p, least, TOP_K, TOP_P, MIN_P, TILE, AT_ONCE)
        whole = tl.sum(by_tile, 0)
        target = _uniform(uniform_ptr, row, word, SEEDED) * whole
        # times the largest number below one
        target = tl.minimum(target, whole * 0.99999999999999988897769753748)
        tile_index = tl.min(tl.where((tl.cumsum(by_tile, 0) > target) & (by_tile > 0), t, TILES), 0)
        # by rounding: the last with any mass
        if tile_index == TILES:
            tile_index = tl.max(tl.where(by_tile > 0, t, 0), 0)
        target -= tl.sum(tl.where(t < tile_index, by_tile, 0.0), 0)
        ids = tile_index * TILE + tl.arange(0, TILE)
        keys, weights = _read_tokens(logits_ptr, ids, vocab, peak, divisor, PROBS, SCALE, LIBDEVICE)
        masses = weights.to(tl.float64)
        if MIN_P:
            masses = tl.where(masses >= least, masses, 0.0)
        counted = (((keys.to(tl.int64) << ID_BITS) | ids) <= cut) & (ids < vocab)
        masses = tl.where(counted, masses, 0.0)
        token = tl.min(tl.where((tl.cumsum(masses, 0) > target) & (masses > 0), ids, 0x7FFFFFFF), 0)
        if token == 0x7FFFFFFF:
            token = tl.max(tl.where(masses > 0, ids, 0), 0)
        tl.store(token_ptr + row, tl.where(whole > 0, token, -1).to(tl.int64))
        tl.store(chosen_ptr + row, tl.sum(tl.where(ids == token, masses, 0.0), 0))
        tl.store(total_ptr + row, whole)
