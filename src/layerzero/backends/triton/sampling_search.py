"""lz.sample without a sort: where the filters cut is searched for, not ranked for.

A row is cut into chunks, one program each, and every step is one launch over all chunks; the last program of a row to
finish looks at what all of them found, decides, and leaves the decision for the next launch.

peak     the largest value, which scores are relative to
narrow   how much mass, and how many tokens, lie above each of seven scores: the cut is between two of them. Two of
         these, or three, leave some hundred candidates of 128,000
draw     the candidates are collected and the cut is found among them exactly; then the token is drawn: first its
         chunk, then its place in the chunk

Tokens rank by (score, id) as one integer: the bits of a float of one sign are in the order of its size, and the id
breaks ties. A cut is one such integer, the last that is kept. The cut and the draw are from sums in float64, as the
contract says, and the exponential is the one torch uses, so the tokens are those of every other kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

MOST_LISTED = 2048         # candidates that the last step can hold
UNSURE = tl.constexpr(4e-6)    # what a mass of narrow_kernel may be wrong by, relatively
ID_BITS = tl.constexpr(20)
ID_MASK = tl.constexpr((1 << 20) - 1)
LIST = tl.constexpr(MOST_LISTED)


@triton.jit
def _clean(value, PROBS: tl.constexpr):
    """NaN is impossible; of logits, what is infinite counts as the largest number."""
    value = value.to(tl.float32)
    if PROBS:
        return tl.where((value > 0.0) & (value < float("inf")), value, 0.0)
    value = tl.where(value == value, value, float("-inf"))
    return tl.minimum(value, 3.4028234663852886e38)


@triton.jit
def _read(
    logits_ptr, id, vocab, peak, divisor, PROBS: tl.constexpr, SCALE: tl.constexpr, LIBDEVICE: tl.constexpr,
):
    """(rank key, weight) of the tokens `id`. Keys rise as scores fall; the impossible have the largest key."""
    inside = id < vocab
    value = _clean(tl.load(logits_ptr + id, mask=inside, other=0.0 if PROBS else float("-inf")), PROBS)
    if PROBS:
        return 0x7FFFFFFF - value.to(tl.int32, bitcast=True), value
    score = value - tl.maximum(peak, -3.4028234663852886e38)
    if SCALE == 1:                                 # as torch divides by one number on a GPU
        score = score * divisor
    elif SCALE == 2:
        score = tl.div_rn(score, divisor)
    weight = libdevice.exp(score) if LIBDEVICE else tl.exp(score)
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF, weight


@triton.jit
def _is_last(count_ptr, row, chunks):
    """Is this the last program of its row? What the others stored before is then there to be read."""
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
    """The largest value of each row. Starts the search: `whole` as narrow_kernel has it."""
    row, chunk, chunks = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    logits_ptr += row.to(tl.int64) * row_stride
    most = tl.full((TILE,), 0.0 if PROBS else float("-inf"), tl.float32)
    for first in tl.static_range(0, CHUNK, TILE):
        id = chunk * CHUNK + first + tl.arange(0, TILE)
        value = tl.load(logits_ptr + id, mask=id < vocab, other=0.0 if PROBS else float("-inf"))
        most = tl.maximum(most, _clean(value, PROBS))
    tl.store(part_ptr + row * chunks + chunk, tl.max(most, 0))
    if _is_last(count_ptr, row, chunks):
        c = tl.arange(0, CHUNKS)
        parts = tl.load(part_ptr + row * chunks + c, mask=c < chunks, other=float("-inf"), cache_modifier=".cg")
        tl.store(peak_ptr + row, tl.max(parts, 0))
        tl.store(whole_ptr + row * 4, 0)
        tl.store(whole_ptr + row * 4 + 1, limit)
        tl.store(whole_ptr + row * 4 + 2, 0)
        tl.store(whole_ptr + row * 4 + 3, vocab)
        tl.store(listed_ptr + row, 0)


@triton.jit
def _edge(J: tl.constexpr, lo, hi, peak, FIRST: tl.constexpr, PROBS: tl.constexpr):
    """Where the J-th of eight parts of [lo, hi) begins, as a key: first at scores where cuts are, then evenly."""
    if FIRST:
        depth = 0.25 * J * (J + 2)                 # 0.75, 2, 3.75, 6, 8.75, 12, 15.75 below the largest
        if PROBS:
            return 0x7FFFFFFF - (peak * tl.exp(-(peak * 0.0 + depth))).to(tl.int32, bitcast=True)
        return (peak * 0.0 + depth).to(tl.int32, bitcast=True)
    if PROBS:
        high = (0x7FFFFFFF - lo).to(tl.float32, bitcast=True)
        low = (0x7FFFFFFF - hi).to(tl.float32, bitcast=True)
        return tl.minimum(tl.maximum(0x7FFFFFFF - (high - (high - low) * (0.125 * J)).to(tl.int32, bitcast=True), lo),
                          hi)
    near = lo.to(tl.float32, bitcast=True)
    far = tl.where(hi >= 0x7F800000, near + 64.0, hi.to(tl.float32, bitcast=True))
    return tl.minimum(tl.maximum((near + (far - near) * (0.125 * J)).to(tl.int32, bitcast=True), lo), hi)


@triton.jit
def _up_to(key, weight, edge, mass, many, MASS: tl.constexpr):
    """Adds what this thread's tokens before the edge weigh, and how many they are."""
    before = key < edge
    if MASS:
        mass += tl.sum(tl.sum(tl.where(before, weight, 0.0), 2), 0).to(tl.float64)
    many += tl.sum(tl.sum(before.to(tl.int32), 2), 0)
    return mass, many


@triton.jit
def _which(n, e0, e1, e2, e3, e4, e5, e6):
    low = tl.where(n == 0, e0, tl.where(n == 1, e1, e2))
    return tl.where(n < 3, low, tl.where(n == 3, e3, tl.where(n == 4, e4, tl.where(n == 5, e5, e6))))


@triton.jit
def _keep(mass_ptr, count_ptr, J: tl.constexpr, mass, many):
    tl.store(mass_ptr + J, tl.sum(mass, 0))
    tl.store(count_ptr + J, tl.sum(many, 0))


@triton.jit(do_not_specialize=["top_k"])
def narrow_kernel(
    logits_ptr, peak_ptr, part_mass_ptr, part_count_ptr, whole_ptr, total_ptr, count_ptr, row_stride, vocab, divisor,
    top_k, top_p: tl.float64,
    FIRST: tl.constexpr, BY_COUNT: tl.constexpr, PROBS: tl.constexpr, SCALE: tl.constexpr, LIBDEVICE: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):
    """One of eight parts of [lo, hi) holds the cut, by number or by mass: that part becomes [lo, hi).

    `whole` is (lo, hi, tokens before lo, tokens before hi). Masses are summed a few at a time in float32, so where
    one is within what that may be wrong by, the parts on both sides of the edge are kept. `total` is the mass of all,
    in float64.
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
        # Tiles of three dimensions, so that most of a sum is within a thread: (steps, threads, a vector of four).
        threads: tl.constexpr = TILE // 4 if TILE <= 1024 else 256
        steps: tl.constexpr = TILE // (4 * threads)
        inner = (tl.arange(0, steps)[:, None, None] * threads + tl.arange(0, threads)[None, :, None]) * 4 \
            + tl.arange(0, 4)[None, None, :]
        none, zero = tl.zeros((threads,), tl.float64), tl.zeros((threads,), tl.int32)
        m0, m1, m2, m3, m4, m5, m6, m7 = none, none, none, none, none, none, none, none
        c1, c2, c3, c4, c5, c6, c7 = zero, zero, zero, zero, zero, zero, zero
        for begin in range(0, CHUNK, TILE):
            key, weight = _read(logits_ptr + row.to(tl.int64) * row_stride, chunk * CHUNK + begin + inner, vocab, peak,
                                divisor, PROBS, SCALE, LIBDEVICE)
            if FIRST and not BY_COUNT:
                m0 += tl.sum(tl.sum(weight.to(tl.float64), 2), 0)
            m1, c1 = _up_to(key, weight, e1, m1, c1, mass)
            m2, c2 = _up_to(key, weight, e2, m2, c2, mass)
            m3, c3 = _up_to(key, weight, e3, m3, c3, mass)
            m4, c4 = _up_to(key, weight, e4, m4, c4, mass)
            m5, c5 = _up_to(key, weight, e5, m5, c5, mass)
            m6, c6 = _up_to(key, weight, e6, m6, c6, mass)
            m7, c7 = _up_to(key, weight, e7, m7, c7, mass)
        masses, counts = part_mass_ptr + (row * chunks + chunk) * 8, part_count_ptr + (row * chunks + chunk) * 8
        _keep(masses, counts, 0, m0, zero)
        _keep(masses, counts, 1, m1, c1)
        _keep(masses, counts, 2, m2, c2)
        _keep(masses, counts, 3, m3, c3)
        _keep(masses, counts, 4, m4, c4)
        _keep(masses, counts, 5, m5, c5)
        _keep(masses, counts, 6, m6, c6)
        _keep(masses, counts, 7, m7, c7)
        if _is_last(count_ptr, row, chunks):
            j, n = tl.arange(0, 8), tl.arange(0, CHUNKS)
            at, real = (row * chunks + n[:, None]) * 8 + j[None, :], n[:, None] < chunks
            mass_of = tl.sum(tl.load(part_mass_ptr + at, mask=real, other=0.0, cache_modifier=".cg"), 0)
            count_of = tl.sum(tl.load(part_count_ptr + at, mask=real, other=0, cache_modifier=".cg"), 0)
            if BY_COUNT:
                cut = tl.sum(((count_of < top_k) & (j > 0)).to(tl.int32), 0)   # that many edges are not enough
                last = cut
            else:
                if FIRST:
                    total = tl.sum(tl.where(j == 0, mass_of, 0.0), 0)
                    tl.store(total_ptr + row, total)
                else:
                    total = tl.load(total_ptr + row)
                cut = tl.sum(((mass_of < top_p * total * (1.0 - UNSURE)) & (j > 0)).to(tl.int32), 0)
                last = tl.sum(((mass_of < top_p * total * (1.0 + UNSURE)) & (j > 0)).to(tl.int32), 0)
            tl.store(whole_ptr + row * 4, tl.where(cut == 0, lo, _which(cut - 1, e1, e2, e3, e4, e5, e6, e7)))
            tl.store(whole_ptr + row * 4 + 1, tl.where(last == 7, hi, _which(last, e1, e2, e3, e4, e5, e6, e7)))
            if cut > 0:
                tl.store(whole_ptr + row * 4 + 2, tl.sum(tl.where(j == cut, count_of, 0), 0))
            if last < 7:
                tl.store(whole_ptr + row * 4 + 3, tl.sum(tl.where(j == last + 1, count_of, 0), 0))


@triton.jit
def _last_kept(place, weight, real, lo, hi, above, target):
    """A place in [lo, hi) at or after the last before which less than `target` lies, and before the next candidate.

    `above` lies before them all. Halves [lo, hi) until one candidate is left in it.
    """
    many = tl.sum((real & (place >= lo) & (place < hi)).to(tl.int32), 0)
    while (many > 1) & (hi - lo > 1):
        middle = lo + (hi - lo) // 2
        if above + tl.sum(tl.where(real & (place < middle), weight, 0.0), 0) < target:
            lo = middle
        else:
            hi = middle
        many = tl.sum((real & (place >= lo) & (place < hi)).to(tl.int32), 0)
    return hi - 1


@triton.jit
def _among_listed(
    list_ptr, weight_ptr, listed, by_tile, tile, begin, end, mass, total, top_k, top_p, least,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """(the last place kept, the mass of each tile) from the candidates. With TOP_K nothing is kept but candidates."""
    i = tl.arange(0, LIST)
    real = i < listed
    place = tl.load(list_ptr + i, mask=real, other=0, cache_modifier=".cg")
    weight = tl.load(weight_ptr + i, mask=real, other=0.0, cache_modifier=".cg").to(tl.float64)
    cut = end - 1
    if TOP_K:
        one = tl.full((LIST,), 1.0, tl.float64)
        cut = _last_kept(place, one, real, begin, end, mass * 0.0, top_k.to(tl.float64))
        mass = mass * 0.0
        total = tl.sum(tl.where(real & (place <= cut), weight, 0.0), 0)
    if TOP_P:
        cut = _last_kept(place, weight, real, begin, cut + 1, mass, top_p * total)
    for first in range(0, listed, AT_ONCE):
        n = first + tl.arange(0, AT_ONCE)
        its_place = tl.load(list_ptr + n, mask=n < listed, other=0, cache_modifier=".cg")
        its_weight = tl.load(weight_ptr + n, mask=n < listed, other=0.0, cache_modifier=".cg").to(tl.float64)
        kept = its_place <= cut
        if MIN_P:
            kept = kept & (its_weight >= least)
        here = kept[:, None] & (((its_place & ID_MASK) // TILE).to(tl.int32)[:, None] == tile[None, :])
        by_tile += tl.sum(tl.where(here, its_weight[:, None], 0.0), 0)
    return cut, by_tile


@triton.jit
def _mass_of_tile(
    logits_ptr, tile, vocab, peak, divisor, last, least, COUNT: tl.constexpr, MIN_P: tl.constexpr,
    PROBS: tl.constexpr, SCALE: tl.constexpr, LIBDEVICE: tl.constexpr, TILE: tl.constexpr,
):
    """What a tile holds up to the place `last`: mass, or with COUNT how many."""
    id = tile * TILE + tl.arange(0, TILE)
    key, weight = _read(logits_ptr, id, vocab, peak, divisor, PROBS, SCALE, LIBDEVICE)
    wide = weight.to(tl.float64)
    near = (((key.to(tl.int64) << ID_BITS) | id) <= last) & (id < vocab)
    if MIN_P:
        near = near & (wide >= least)
    if COUNT:
        wide = tl.full((TILE,), 1.0, tl.float64)
    return tl.sum(tl.where(near, wide, 0.0), 0)


@triton.jit
def _last_kept_of_all(
    logits_ptr, vocab, peak, divisor, tiles, lo, hi, target, COUNT: tl.constexpr, PROBS: tl.constexpr,
    SCALE: tl.constexpr, LIBDEVICE: tl.constexpr, TILE: tl.constexpr,
):
    while hi - lo > 1:
        middle = lo + (hi - lo) // 2
        reached = target * 0.0
        for n in range(tiles):
            reached += _mass_of_tile(logits_ptr, n, vocab, peak, divisor, middle - 1, target, COUNT, False, PROBS,
                                      SCALE, LIBDEVICE, TILE)
        if reached < target:
            lo = middle
        else:
            hi = middle
    return lo


@triton.jit
def _among_all(
    logits_ptr, vocab, peak, divisor, c, tiles, begin, end, total, top_k, top_p, least,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, PROBS: tl.constexpr, SCALE: tl.constexpr,
    LIBDEVICE: tl.constexpr, TILE: tl.constexpr,
):
    """The same from the whole row, for one with thousands of equal scores: slow, and always right."""
    cut = end - 1
    if TOP_K:
        cut = _last_kept_of_all(logits_ptr, vocab, peak, divisor, tiles, begin, end, top_k.to(tl.float64), True,
                                PROBS, SCALE, LIBDEVICE, TILE)
        total = total * 0.0
        for n in range(tiles):
            total += _mass_of_tile(logits_ptr, n, vocab, peak, divisor, cut, least, False, False, PROBS, SCALE,
                                    LIBDEVICE, TILE)
    if TOP_P:
        cut = _last_kept_of_all(logits_ptr, vocab, peak, divisor, tiles, begin, cut + 1, top_p * total, False, PROBS,
                                SCALE, LIBDEVICE, TILE)
    by_tile = (c * 0).to(tl.float64)
    for n in range(tiles):
        mass = _mass_of_tile(logits_ptr, n, vocab, peak, divisor, cut, least, False, MIN_P, PROBS, SCALE, LIBDEVICE,
                              TILE)
        by_tile = tl.where(c == n, mass, by_tile)
    return cut, by_tile


@triton.jit
def _uniform(uniform_ptr, row, word, SEEDED: tl.constexpr):
    """The row's random number: given, or draw 0 of SplitMix64 at `word` + row * GOLDEN, see formulas/sampling.py."""
    if not SEEDED:
        return tl.load(uniform_ptr + row)
    x = word + row.to(tl.int64) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16


@triton.jit(do_not_specialize=["top_k", "word"])
def draw_kernel(
    logits_ptr, peak_ptr, whole_ptr, whole_mass_ptr, list_ptr, list_weight_ptr, listed_ptr, sure_ptr, before_ptr,
    count_ptr, uniform_ptr, token_ptr, chosen_ptr, total_ptr, row_stride, vocab, divisor, top_k, top_p: tl.float64,
    min_p: tl.float64, word: tl.int64,
    SEARCH: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, SEEDED: tl.constexpr,
    PROBS: tl.constexpr, SCALE: tl.constexpr, LIBDEVICE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Collects what lies in [lo, hi), finds the cut, draws. With TOP_K all that may be kept is collected."""
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
    largest = peak.to(tl.float64) if PROBS else tl.where(peak == float("-inf"), 0.0, 1.0).to(tl.float64)
    least = min_p * largest
    for tile in range(chunk * (CHUNK // TILE), tl.minimum((chunk + 1) * (CHUNK // TILE), tiles)):
        id = tile * TILE + tl.arange(0, TILE)
        key, weight = _read(logits_ptr, id, vocab, peak, divisor, PROBS, SCALE, LIBDEVICE)
        sure = weight.to(tl.float64)
        if SEARCH:
            sure = tl.where(key < first, sure, 0.0)
        if MIN_P:
            if SEARCH:
                tl.store(before_ptr + row * tiles + tile, tl.sum(sure, 0))     # min_p comes after top_p
            sure = tl.where(sure >= least, sure, 0.0)
        tl.store(sure_ptr + row * tiles + tile, tl.sum(sure, 0))
        if SEARCH:
            listed = (key >= first) & (key < hi)
            many = tl.sum(listed.to(tl.int32), 0)
            if (many > 0) & (inside <= LIST):
                at = tl.atomic_add(listed_ptr + row, many) + tl.cumsum(listed.to(tl.int32), 0) - 1
                tl.store(list_ptr + row * LIST + at, (key.to(tl.int64) << ID_BITS) | id, mask=listed)
                tl.store(list_weight_ptr + row * LIST + at, weight, mask=listed)

    if _is_last(count_ptr, row, chunks):
        t = tl.arange(0, TILES)
        by_tile = tl.load(sure_ptr + row * tiles + t, mask=t < tiles, other=0.0, cache_modifier=".cg")
        cut = (hi.to(tl.int64) << ID_BITS) - 1                                 # the last place that is kept
        if SEARCH:
            begin, end = first.to(tl.int64) << ID_BITS, hi.to(tl.int64) << ID_BITS
            mass = tl.sum(by_tile, 0)
            if MIN_P:
                mass = tl.sum(tl.load(before_ptr + row * tiles + t, mask=t < tiles, other=0.0, cache_modifier=".cg"), 0)
            total = mass
            if not TOP_K:
                total = tl.load(whole_mass_ptr + row)
            if inside > LIST:
                cut, by_tile = _among_all(
                    logits_ptr, vocab, peak, divisor, t, tiles, begin, end, total, top_k, top_p, least, TOP_K, TOP_P,
                    MIN_P, PROBS, SCALE, LIBDEVICE, TILE)
            else:
                cut, by_tile = _among_listed(
                    list_ptr + row * LIST, list_weight_ptr + row * LIST,
                    tl.load(listed_ptr + row, cache_modifier=".cg"), by_tile, t, begin, end, mass, total,
                    top_k, top_p, least, TOP_K, TOP_P, MIN_P, TILE, AT_ONCE)
        whole = tl.sum(by_tile, 0)
        goal = _uniform(uniform_ptr, row, word, SEEDED) * whole
        goal = tl.minimum(goal, whole * 0.99999999999999988897769753748)       # times the number next below one
        picked = tl.min(tl.where((tl.cumsum(by_tile, 0) > goal) & (by_tile > 0), t, TILES), 0)
        if picked == TILES:                                                    # by rounding: the last that has any
            picked = tl.max(tl.where(by_tile > 0, t, 0), 0)
        goal -= tl.sum(tl.where(t < picked, by_tile, 0.0), 0)
        spot = picked * TILE + tl.arange(0, TILE)
        its_key, its_weight = _read(logits_ptr, spot, vocab, peak, divisor, PROBS, SCALE, LIBDEVICE)
        wide = its_weight.to(tl.float64)
        if MIN_P:
            wide = tl.where(wide >= least, wide, 0.0)
        wide = tl.where((((its_key.to(tl.int64) << ID_BITS) | spot) <= cut) & (spot < vocab), wide, 0.0)
        token = tl.min(tl.where((tl.cumsum(wide, 0) > goal) & (wide > 0), spot, 0x7FFFFFFF), 0)
        if token == 0x7FFFFFFF:
            token = tl.max(tl.where(wide > 0, spot, 0), 0)
        tl.store(token_ptr + row, tl.where(whole > 0, token, -1).to(tl.int64))
        tl.store(chosen_ptr + row, tl.sum(tl.where(spot == token, wide, 0.0), 0))
        tl.store(total_ptr + row, whole)
