// Products with at most eight rows or columns: one operand is large and read once, the other is
// small and stays in the L1 cache. A warp is 32 lanes here, the half of a wave of 64: no lane returns
// before the shuffles, which do not cross the halves. `large` is the matrix of `count` vectors, `small` the one of
// `few`; `take(vector, number of the small vector, sum)` receives the results.

/// Adds the sums of a warp's lanes, of which each lane then takes one.
template <int LARGE, int FEW, class Parts, class Take>
SLABWISE_INLINE void give_lanes(const float (&sum)[LARGE][FEW], int first, int count, int few, const Parts& parts, Take take) {
    const int lane = int(threadIdx.x) % 32;
    static_assert(LARGE * FEW <= 32, "one sum per lane");
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < LARGE; ++i) {
#pragma unroll
        for (int s = 0; s < FEW; ++s) {
            float all = sum[i][s];
#pragma unroll
            for (int other = 16; other > 0; other /= 2) all += from_lane_xor(all, other);
            mine = lane == i * FEW + s ? all : mine;
        }
    }
    if (!parts.join(mine)) return;
    const int i = lane / FEW, s = lane % FEW;
    if (i < LARGE && first + i < count && s < few) take(first + i, s, mine);
}

/// For a contracted axis along which the large operand is contiguous (or nearly): a warp per LARGE
/// vectors, whose lanes run along the contracted axis, V elements each. They read elements of the
/// small operand SV at a time, if it is whole.
template <int FEW, int LARGE, int V, int SV, class Large, class Small, class Parts, class Take>
SLABWISE_INLINE void dot_products(const Large& large, const Small& small, int first, int count, int few, int deep, int end, const Parts& parts,
                                  Take take) {
    using E = typename Large::Element;
    using Other = Vec<typename Small::Element, SV>;
    static_assert(V % SV == 0, "vectors of the small operand lie in one of the large");
    const int lane = int(threadIdx.x) % 32;
    float sum[LARGE][FEW];
    typename Large::Spot vectors[LARGE];
    typename Small::Spot others[FEW];
#pragma unroll
    for (int i = 0; i < LARGE; ++i) vectors[i] = Large::Free::at(large.w, first + i);
#pragma unroll
    for (int s = 0; s < FEW; ++s) others[s] = Small::Free::at(small.w, s);
#pragma unroll
    for (int i = 0; i < LARGE; ++i)
#pragma unroll
        for (int s = 0; s < FEW; ++s) sum[i][s] = 0.0f;
    const bool whole = V > 1 && large.whole(), whole_others = SV > 1 && small.whole();
#pragma unroll 1
    for (int k = deep + lane * V; k < end; k += 32 * V) {
        Vec<E, V> values[LARGE];
        typename Large::Spot steps[V];
#pragma unroll
        for (int v = 0; v < V; ++v) steps[v] = Large::Deep::at(large.w, k + v);
#pragma unroll
        for (int i = 0; i < LARGE; ++i) {
            if (whole && (!Large::PARTIAL || k + V <= end)) {
                values[i] = first + i < count && large.inside(vectors[i], steps[0]) ? load_vec<Vec<E, V>>(large.address(vectors[i], steps[0])) : Vec<E, V>{};
            } else {
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const bool wanted = first + i < count && k + v < end && large.inside(vectors[i], steps[v]);
                    values[i].v[v] = wanted ? *large.address(vectors[i], steps[v]) : E{};
                }
            }
        }
        // The last vector of an operand without partial ones is whole, too.
        if (whole_others && ((whole && !Large::PARTIAL) || k + V <= end)) {
#pragma unroll
            for (int v = 0; v < V; v += SV) {
                const typename Small::Spot step = Small::Deep::at(small.w, k + v);
#pragma unroll
                for (int s = 0; s < FEW; ++s) {
                    const Other some = s < few ? load_vec<Other>(small.address(others[s], step)) : Other{};
#pragma unroll
                    for (int i = 0; i < LARGE; ++i)
#pragma unroll
                        for (int u = 0; u < SV; ++u) sum[i][s] = fmaf(widen(values[i].v[v + u]), widen(some.v[u]), sum[i][s]);
                }
            }
            continue;
        }
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const typename Small::Spot step = Small::Deep::at(small.w, k + v);
#pragma unroll
            for (int s = 0; s < FEW; ++s) {
                const bool wanted = s < few && k + v < end && small.inside(others[s], step);
                const float other = wanted ? widen(*small.address(others[s], step)) : 0.0f;
#pragma unroll
                for (int i = 0; i < LARGE; ++i) sum[i][s] = fmaf(widen(values[i].v[v]), other, sum[i][s]);
            }
        }
    }
    give_lanes(sum, first, count, few, parts, take);
}

/// For vectors that are neighbours in memory: lanes run from vector to vector, V each, and the
/// block's warps share the contracted axis.
template <int FEW, int WARPS, int V, class Large, class Small, class Parts, class Take>
SLABWISE_INLINE void column_sums(const Large& large, const Small& small, int first, int count, int few, int deep, int end, float* shared,
                                 const Parts& parts, Take take) {
    using E = typename Large::Element;
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, mine = first + lane * V;
    float sum[FEW][V];
    typename Large::Spot vectors[V];
    typename Small::Spot others[FEW];
#pragma unroll
    for (int v = 0; v < V; ++v) vectors[v] = Large::Free::at(large.w, mine + v);
#pragma unroll
    for (int s = 0; s < FEW; ++s) others[s] = Small::Free::at(small.w, s);
#pragma unroll
    for (int s = 0; s < FEW; ++s)
#pragma unroll
        for (int v = 0; v < V; ++v) sum[s][v] = 0.0f;
    const bool whole = V > 1 && large.whole();
#pragma unroll 4
    for (int k = deep + warp; k < end; k += WARPS) {
        const typename Large::Spot down = Large::Deep::at(large.w, k);
        const typename Small::Spot step = Small::Deep::at(small.w, k);
        Vec<E, V> values;
        if (whole && (!Large::PARTIAL || mine + V <= count)) {
            values = mine < count && large.inside(vectors[0], down) ? load_vec<Vec<E, V>>(large.address(vectors[0], down)) : Vec<E, V>{};
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const bool wanted = mine + v < count && large.inside(vectors[v], down);
                values.v[v] = wanted ? *large.address(vectors[v], down) : E{};
            }
        }
#pragma unroll
        for (int s = 0; s < FEW; ++s) {
            const float other = s < few && small.inside(others[s], step) ? widen(*small.address(others[s], step)) : 0.0f;
#pragma unroll
            for (int v = 0; v < V; ++v) sum[s][v] = fmaf(widen(values.v[v]), other, sum[s][v]);
        }
    }
    // [warp][small vector][V of the lane][lane]: a warp writes and reads neighbours.
#pragma unroll
    for (int s = 0; s < FEW; ++s)
#pragma unroll
        for (int v = 0; v < V; ++v) shared[((warp * FEW + s) * V + v) * 32 + lane] = sum[s][v];
    __syncthreads();
    // The vectors of a thread: the first threads alone have one where there are few.
    constexpr int VECTORS = FEW * V * 32, THREADS = WARPS * 32, EACH = (VECTORS + THREADS - 1) / THREADS;
    float all[EACH];
#pragma unroll
    for (int turn = 0; turn < EACH; ++turn) {
        const int at = int(threadIdx.x) + turn * THREADS;
        all[turn] = 0.0f;
        if (at >= VECTORS) continue;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) all[turn] += shared[i * VECTORS + at];
    }
    if (!parts.join(all)) return;
#pragma unroll
    for (int turn = 0; turn < EACH; ++turn) {
        const int at = int(threadIdx.x) + turn * THREADS;
        const int s = at / (V * 32), vector = first + at % 32 * V + at / 32 % V;
        if (at < VECTORS && vector < count && s < few) take(vector, s, all[turn]);
    }
}
