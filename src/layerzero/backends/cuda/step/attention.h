// The attention of step.cu: a worker (a block) has one KV head and a range of the cached tokens; the last
// worker of a head also has the new token, and writes its key and value to the cache.

// Scratch memory of a worker, in place of the odd x: queries, key and value as received; the queries as
// operands of the tensor cores; maxima, sums and outputs of each warp and of the new token.
constexpr int OUT_PITCH = DIM + 2;                 // floats: those of a head, its maximum and its sum

struct Scratch {
    float* raw;                                    // (GROUP + 2) x DIM
    u8* queries;                                   // COLS * 8 rows, PITCH apart
    float* parts;                                  // WARPS + 1, each of GROUP x OUT_PITCH
};

FN Scratch scratch() {
    u8* at = (u8*)odd_x();
    return {(float*)(at + COLS * 8 * PITCH), at, (float*)(at + COLS * 8 * PITCH) + (GROUP + 2) * DIM};
}

// Normalises and rotates one head, by one warp; passes the rounded result to `put`
template <typename Put> FN void norm_and_rotate(float* raw, const u16* weight, float eps, const float (&cos)[(DIM + 31) / 32],
                                       const float (&sin)[(DIM + 31) / 32], Put put) {
    float x[(DIM + 31) / 32];
#if HEAD_NORMS
    float square = 0;
    UNROLL for (int n = 0; n < (DIM + 31) / 32; ++n)
        if (n * 32 + lane() < DIM) square += raw[n * 32 + lane()] * raw[n * 32 + lane()];
    const float inverse = rsqrtf(warp_sum(square) / DIM + eps);
    UNROLL for (int n = 0; n < (DIM + 31) / 32; ++n) {
        const int d = n * 32 + lane();
        if (d < DIM) raw[d] = raw[d] * inverse * to_float<true>(weight[d]);
    }
    sync_warp();
#endif
    UNROLL for (int n = 0; n < (DIM + 31) / 32; ++n) {
        const int d = n * 32 + lane();
        if (d >= DIM) continue;
        x[n] = d < HALF ? raw[d] * cos[n] - raw[d + HALF] * sin[n]
             : d < 2 * HALF ? raw[d] * cos[n] + raw[d - HALF] * sin[n] : raw[d];
    }
    sync_warp();                                   // all lanes have read what may be written over
    UNROLL for (int n = 0; n < (DIM + 31) / 32; ++n)
        if (n * 32 + lane() < DIM) put(n * 32 + lane(), from_float<true>(x[n]));
}

// The tiles of one worker that are this warp's; what it found goes to its part
FN void over_cached(const Consumer& work, const Spread& over, int split, const Scratch& at, float scale) {
    const int g = lane() / 4, t = lane() % 4;
    float best[COLS][2], total[COLS][2], acc[COLS][DIM / 16][4];
    UNROLL for (int c = 0; c < COLS; ++c) {
        UNROLL for (int e = 0; e < 2; ++e) best[c][e] = NONE, total[c][e] = 0;
        UNROLL for (int n = 0; n < DIM / 16; ++n) acc[c][n][0] = acc[c][n][1] = acc[c][n][2] = acc[c][n][3] = 0;
    }
    u32 q[COLS][DIM / 16][2];
    UNROLL for (int c = 0; c < COLS; ++c)
        UNROLL for (int n = 0; n < DIM / 16; n += 2) {
            u32 both[4];                           // the last of an odd number is read twice
            ldmatrix4(both, at.queries + (c * 8 + lane() % 8) * PITCH + min_int(2 * n + lane() / 8, DIM / 8 - 1) * 16);
            q[c][n][0] = both[0], q[c][n][1] = both[1];
            if (n + 1 < DIM / 16) q[c][n + 1][0] = both[2], q[c][n + 1][1] = both[3];
        }
    const int begin = over.begin(split), end = over.end(split), tiles = over.tiles(split);
    ROLLED for (int n = (warp() + WARPS - work.next % WARPS) % WARPS; n < tiles; n += WARPS) {
        const u8* keys = work.tile(work.next + n);
        const u8* values = keys + CACHED;
        const int many = min_int(TOKENS, end - begin - n * TOKENS), steps = ceil_div(many, 16);
        float scores[TOKENS / 16][COLS][4];
        UNROLL for (int s = 0; s < TOKENS / 16; ++s) {
            UNROLL for (int c = 0; c < COLS; ++c) scores[s][c][0] = scores[s][c][1] = scores[s][c][2] = scores[s][c][3] = 0;
            if (s < steps)
                UNROLL for (int d = 0; d < DIM / 16; ++d) {
                    u32 a[4];
                    ldmatrix4(a, keys + cached_at(s * 16 + lane() % 16, 2 * d + lane() / 16));
                    UNROLL for (int c = 0; c < COLS; ++c) mma<true>(scores[s][c], a, q[c][d]);
                }
            UNROLL for (int c = 0; c < COLS; ++c)
                UNROLL for (int e = 0; e < 4; ++e)
                    scores[s][c][e] = s * 16 + e / 2 * 8 + g < many ? scores[s][c][e] * scale : NONE;
        }
        UNROLL for (int c = 0; c < COLS; ++c)
            UNROLL for (int e = 0; e < 2; ++e) {
                float top = best[c][e];
                UNROLL for (int s = 0; s < TOKENS / 16; ++s) top = fmaxf(top, fmaxf(scores[s][c][e], scores[s][c][e + 2]));
                UNROLL for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
                const float rescale = fast_exp2(best[c][e] - top);
                best[c][e] = top;
                total[c][e] *= rescale;
                UNROLL for (int d = 0; d < DIM / 16; ++d) acc[c][d][e] *= rescale, acc[c][d][e + 2] *= rescale;
            }
        UNROLL for (int s = 0; s < TOKENS / 16; ++s) {
            if (s >= steps) continue;
            u32 weights[COLS][2];
            UNROLL for (int c = 0; c < COLS; ++c) {
                float w[4];
                UNROLL for (int e = 0; e < 4; ++e) {
                    w[e] = fast_exp2(scores[s][c][e] - best[c][e % 2]);
                    total[c][e % 2] += w[e];
                }
                weights[c][0] = transpose_8x8(pack2<true>(w[0], w[1]));
                weights[c][1] = transpose_8x8(pack2<true>(w[2], w[3]));
            }
            UNROLL for (int d = 0; d < DIM / 16; ++d) {
                u32 a[4];
                ldmatrix4_transposed(a, values + cached_at(s * 16 + lane() / 16 * 8 + lane() % 8, 2 * d + lane() / 8 % 2));
                UNROLL for (int c = 0; c < COLS; ++c) mma<true>(acc[c][d], a, weights[c]);
            }
        }
        work.release(work.next + n);
    }
    UNROLL for (int c = 0; c < COLS; ++c)
        UNROLL for (int e = 0; e < 2; ++e) {
            const int row = c * 8 + 2 * t + e;
            float sum = total[c][e];
            UNROLL for (int mask = 4; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
            if (row >= GROUP) continue;
            float* to = at.parts + (warp() * GROUP + row) * OUT_PITCH;
            UNROLL for (int d = 0; d < DIM / 16; ++d) {
                to[d * 16 + g] = acc[c][d][e];
                to[d * 16 + 8 + g] = acc[c][d][e + 2];
            }
            if (g == 0) to[DIM] = best[c][e], to[DIM + 1] = sum;
        }
}

// Four values of a head; all lanes call it
FN void post_attention(u64* words, int query, int quad, const float (&v)[4], u32 tag, bool wanted) {
#if CODES
    post_fours(words + ATTENTION_AT + (query * (DIM / 4) + quad) / 2 * 2, v, tag, wanted);
#else
    u64* to = words + ATTENTION_AT + query * (DIM / 2) + 2 * quad;
    if (wanted) post(to, word(pack2<true>(v[0], v[1]), tag)), post(to + 1, word(pack2<true>(v[2], v[3]), tag));
#endif
}

FN void attend(Consumer& work, const Layer& layer, const Spread& over, u64* words, u32 tag, const Params& p) {
    const Share share = take(work.first, over.workers());
    const Scratch at = scratch();
    ROLLED for (int n = 0; n < share.count; ++n) {
        const int split = share.item(n) % over.splits, pair = share.item(n) / over.splits;
        const int b = pair / KV_HEADS, head = pair % KV_HEADS;
        const bool last = split == over.splits - 1;
        work.entered();
        float cos[(DIM + 31) / 32], sin[(DIM + 31) / 32];
        UNROLL for (int d = 0; d < (DIM + 31) / 32; ++d) {
            const u16* row = layer.angles + i64(over.position) * (4 * HALF) + d * 32 + lane();
            const bool is_rotated = d * 32 + lane() < 2 * HALF;
            cos[d] = is_rotated ? to_float<true>(row[0]) : 1.0f;
            sin[d] = is_rotated ? to_float<true>(row[2 * HALF]) : 0.0f;
        }
        const u64* from = words + QKV_AT + b * QKV;
        constexpr int QUERIES = GROUP * DIM / 2;   // pairs of words, before those of the key and the value
        const u64* queries = from + head * GROUP * DIM;
        const u64* key = from + (HEADS + head) * DIM - 2 * QUERIES;
        const u64* value = from + (HEADS + KV_HEADS + head) * DIM - 2 * QUERIES - DIM;
        receive_at<QUERIES + DIM>(
            [=](int unit) {                        // only who keeps the new token asks for its key and value
                const u64* of = unit < QUERIES || !last ? queries : unit < QUERIES + DIM / 2 ? key : value;
                return of + 2 * (unit < QUERIES || last ? unit : 0);
            },
            HaveTag{tag}, [=](int unit, Words v, int) {
                at.raw[2 * unit] = bits_float(u32(v.x)), at.raw[2 * unit + 1] = bits_float(u32(v.y));
            });
        sync_first(THREADS);
        STAMP(work.phase, 0);
        const i64 place = ((b * p.capacity + over.position) * KV_HEADS + head) * DIM;
        ROLLED for (int row = warp(); row < COLS * 8 || row < GROUP + 2; row += WARPS) {
            float* raw = at.raw + row * DIM;
            u16* query = (u16*)(at.queries + row * PITCH);
            if (row < GROUP) norm_and_rotate(raw, layer.q_norm, p.head_norm_eps, cos, sin, [&](int d, u16 x) { query[d] = x; });
            else if (row < COLS * 8)
                for (int d = lane(); d < DIM; d += 32) query[d] = 0;
            if (last && row == GROUP)
                norm_and_rotate(raw, layer.k_norm, p.head_norm_eps, cos, sin, [&](int d, u16 x) {
                    layer.keys[place + d] = x;
                    raw[d] = to_float<true>(x);
                });
            if (last && row == GROUP + 1)
                for (int d = lane(); d < DIM; d += 32) {
                    const u16 x = from_float<true>(raw[d]);
                    layer.values[place + d] = x;
                    raw[d] = to_float<true>(x);
                }
        }
        sync_first(THREADS);
        if (last)
            ROLLED for (int row = warp(); row < GROUP; row += WARPS) {
                float* to = at.parts + (WARPS * GROUP + row) * OUT_PITCH;
                float score = 0;
                for (int d = lane(); d < DIM; d += 32) {
                    score += to_float<true>(((const u16*)(at.queries + row * PITCH))[d]) * at.raw[GROUP * DIM + d];
                    to[d] = at.raw[(GROUP + 1) * DIM + d];
                }
                score = warp_sum(score);
                if (lane() == 0) to[DIM] = score * p.scale, to[DIM + 1] = 1.0f;
            }
        over_cached(work, over, split, at, p.scale);
        work.next += over.tiles(split);
        sync_first(THREADS);
        constexpr int QUADS = GROUP * DIM / 4;
        ROLLED for (int first = 32 * warp(); first < QUADS; first += THREADS) {
            const int unit = min_int(first + lane(), QUADS - 1), row = unit / (DIM / 4), quad = unit % (DIM / 4);
            const int query = b * HEADS + head * GROUP + row;
            float top = NONE, sum = 0, v[4] = {0, 0, 0, 0}, tops[WARPS + 1];
            UNROLL for (int w = 0; w <= WARPS; ++w) {      // the new token's part is the last
                tops[w] = w < WARPS || last ? at.parts[(w * GROUP + row) * OUT_PITCH + DIM] : NONE;
                top = fmaxf(top, tops[w]);
            }
            UNROLL for (int w = 0; w <= WARPS; ++w) {
                if (w == WARPS && !last) continue;
                const float* part = at.parts + (w * GROUP + row) * OUT_PITCH;
                const float by = fast_exp2(tops[w] - top);
                sum += part[DIM + 1] * by;
                UNROLL for (int e = 0; e < 4; ++e) v[e] += part[4 * quad + e] * by;
            }
            const float by = 1.0f / sum;
            UNROLL for (int e = 0; e < 4; ++e) v[e] *= by;
            const bool wanted = first + lane() < QUADS;
            if (over.splits == 1) post_attention(words, query, quad, v, tag, wanted);
            else if (wanted)
                post_whole(words + PARTS_AT + ((query * SPLITS + split) * (DIM / 4) + quad) * 2,
                           {u64(pack2<true>(v[2], v[3])) << 32 | pack2<true>(v[0], v[1]),
                            word(float_bits(top + fast_log2(sum)), tag)});
        }
        sync_first(THREADS);                       // the next worker, or the product that follows, may write here
        STAMP(work.phase, 1);
    }
    ++work.phase;
}

// Merges the splits of a head: a warp has PIECE words of each, four values and the logarithm of the split's
// sum, and polls those of 16 splits at once. The code is short, since its instructions are fetched again in
// every layer.
FN void merge(Consumer& work, const Spread& over, u64* words, u32 tag) {
    const Share share = take(work.first, MERGES);
    constexpr int BESIDE = 32 / PIECE, EACH = 2, MANY = BESIDE * EACH;     // splits of a lane's neighbours, its own, all
    ROLLED for (int n = warp(); n < share.count; n += WARPS) {
        const int query = share.item(n) / PIECES, quad = share.item(n) % PIECES * PIECE + lane() % PIECE;
        float top = NONE, whole = 0, v[4] = {0, 0, 0, 0};
        ROLLED for (int split = lane() / PIECE; split < ceil_div(over.splits, BESIDE) * BESIDE; split += MANY) {
            const u64* parts = words + PARTS_AT + (query * SPLITS * (DIM / 4) + quad) * 2;
            Words part[EACH];
            bool all;
            do {
                all = true;
                UNROLL for (int e = 0; e < EACH; ++e) {
                    part[e] = peek_whole(parts + min_int(split + e * BESIDE, over.splits - 1) * (DIM / 2));
                    all &= u32(part[e].y >> 32) == tag;
                }
            } while (!all && !given_up());
            UNROLL for (int e = 0; e < EACH; ++e) {
                const float log_sum = split + e * BESIDE < over.splits ? bits_float(u32(part[e].y)) : NONE;
                const float before = top;
                top = fmaxf(top, log_sum);
                const float by = log_sum == NONE ? 0.0f : fast_exp2(log_sum - top), rescale = fast_exp2(before - top);
                whole = whole * rescale + by;
                v[0] = v[0] * rescale + by * low(u32(part[e].x)), v[1] = v[1] * rescale + by * high(u32(part[e].x));
                v[2] = v[2] * rescale + by * low(u32(part[e].x >> 32));
                v[3] = v[3] * rescale + by * high(u32(part[e].x >> 32));
            }
        }
        float most = top;
        UNROLL for (int mask = PIECE; mask < 32; mask *= 2) most = fmaxf(most, shuffle_xor(most, mask));
        const float rescale = fast_exp2(top - most);
        whole *= rescale;
        UNROLL for (int e = 0; e < 4; ++e) v[e] *= rescale;
        UNROLL for (int mask = PIECE; mask < 32; mask *= 2) {
            whole += shuffle_xor(whole, mask);
            UNROLL for (int e = 0; e < 4; ++e) v[e] += shuffle_xor(v[e], mask);
        }
        const float by = 1.0f / whole;
        UNROLL for (int e = 0; e < 4; ++e) v[e] *= by;
        post_attention(words, query, quad, v, tag, lane() < PIECE);
    }
}
