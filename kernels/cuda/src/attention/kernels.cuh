// Attention as in Dao, "FlashAttention-2" (2023): a block has some rows of one side in shared
// memory and walks along tiles of the other, of which it leaves out those that no row sees.

/// 2 to the power of x, at most one unit of 2⁻²² away, or 0 where that is below the normal numbers.
SLABWISE_INLINE float power_of_two(float x) {
#ifdef SLABWISE_EMULATED
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

/// The lengths of attention, and the pairs of a query and a key that see each other: the key's
/// position less the query's is above -`behind` and below `ahead`. A query is STEP positions, 1 or 0,
/// behind the one before.
template <int STEP>
struct AttentionShape {
    int queries, keys, width, columns, past, behind, ahead;
    float scale;

    /// For a past that is so much longer than that of the words, which are up to 2²⁷. Beyond ±2²⁹ it
    /// makes no difference.
    SLABWISE_METHOD AttentionShape(const u64* w, int more)
        : queries(int(w[0])), keys(int(w[1])), width(int(w[2])), columns(int(w[3])), past(int(w[4]) + max(-(1 << 29), min(1 << 29, more))), behind(int(w[5])), ahead(int(w[6])),
          scale(__uint_as_float(unsigned(w[7]))) {}
    SLABWISE_METHOD bool sees(int query, int key) const {
        const int distance = key - query * STEP - past;
        return distance > -behind && distance < ahead && key < keys;
    }
    /// Whether each of these queries sees each of these keys.
    SLABWISE_METHOD bool all_see(int query, int queries_after, int key, int keys_after) const {
        return sees(query, keys_after - 1) && sees(queries_after - 1, key) && sees(query, key) && sees(queries_after - 1, keys_after - 1);
    }
    /// The keys that some query sees of those from `first` to before `after`.
    SLABWISE_METHOD int first_key(int first) const { return max(0, first * STEP + past - behind + 1); }
    SLABWISE_METHOD int after_keys(int after) const { return min(keys, (after - 1) * STEP + past + ahead); }
    /// The queries that see some key of those from `first` to before `after`, or more.
    SLABWISE_METHOD int first_query(int first) const { return STEP == 0 ? 0 : max(0, first - ahead + 1 - past); }
    SLABWISE_METHOD int after_queries(int after) const { return STEP == 0 ? queries : min(queries, after - 1 + behind - past); }
};

/// The logarithm of e to the base of two.
static constexpr float LOG2_E = 1.44269504f;

/// Scores to the base of two that are products times a factor.
struct ScaledScores {
    static constexpr bool CAPPED = false, MASKED = false;

    template <class Shape>
    static SLABWISE_METHOD float factor(const Shape& shape) { return shape.scale * LOG2_E; }
    static SLABWISE_METHOD float power(float x) { return power_of_two(x); }
};

/// A stored truth value.
struct TruthValue {
    unsigned char byte;
};

/// The term of a score that an element of a mask is.
template <class E>
SLABWISE_INLINE float mask_term(E x) { return widen(x); }
SLABWISE_INLINE float mask_term(TruthValue sees) { return sees.byte != 0 ? 0.0f : -infinity(); }

/// The terms of the scores of a head. ALIKE: all queries have the same.
template <class E, class Index, bool ALIKE>
struct AttentionMask {
    static constexpr bool MASKED = true;
    const E* first;
    Index row, column;

    /// That of a query, if it is one of so many, and of a key.
    SLABWISE_METHOD float term(int query, int queries, int key) const {
        if (ALIKE) return mask_term(first[Index(key) * column]);
        return query < queries ? mask_term(first[Index(query) * row + Index(key) * column]) : 0.0f;
    }
};

struct NoMask {
    static constexpr bool MASKED = false;

    static SLABWISE_METHOD float term(int, int, int) { return 0.0f; }
};

/// Scores to the base of e, limited to ±`cap` if CAPPED, and with the terms of a mask. To the base of
/// two the least numbers, which masks have too, would be infinite.
template <bool CAPPED_, class Mask>
struct AdjustedScores {
    static constexpr bool CAPPED = CAPPED_, MASKED = Mask::MASKED;
    float cap;
    Mask mask;

    template <class Shape>
    static SLABWISE_METHOD float factor(const Shape& shape) { return shape.scale; }
    static SLABWISE_METHOD float power(float x) { return power_of_two(x * LOG2_E); }
};

/// Turns products into scores, minus infinity where the query does not see the key, and gives the
/// derivatives of limited ones. The rows of a tile are queries from `row` on and its columns keys
/// from `column` on, or, if KEYS, the other way round.
template <class T, bool KEYS, class Shape, class Terms>
SLABWISE_INLINE void make_scores(typename T::Scores& s, typename T::Scores& derivatives, const Shape& shape, const Terms& terms,
                                 int row, int column) {
    const float factor = Terms::factor(shape);
    const int query = KEYS ? column : row, key = KEYS ? row : column;
    const int queries = KEYS ? T::COLUMNS : T::ROWS, keys = KEYS ? T::ROWS : T::COLUMNS;
    const bool whole = query + queries <= shape.queries && shape.all_see(query, query + queries, key, key + keys);
#pragma unroll
    for (int w = 0; w < T::ACROSS; ++w)
#pragma unroll
        for (int r = 0; r < T::HIGH; ++r) {
            float& score = T::score(s, r, w);
            score *= factor;
            if constexpr (Terms::CAPPED) {
                const float part = tanhf(score / terms.cap);
                score = part * terms.cap;
                T::score(derivatives, r, w) = 1.0f - part * part;
            }
            if constexpr (Terms::MASKED) {
                const int own = row + T::row(r), other = column + T::score_column(w);
                const int of_key = KEYS ? own : other;
                const float term = of_key < shape.keys ? terms.mask.term(KEYS ? other : own, shape.queries, of_key) : 0.0f;
                score = term == -infinity() ? term : score + term;
            }
        }
    if (whole) return;
#pragma unroll
    for (int r = 0; r < T::HIGH; ++r)
#pragma unroll
        for (int w = 0; w < T::ACROSS; ++w) {
            const int own = row + T::row(r), other = column + T::score_column(w);
            const bool visible = KEYS ? other < shape.queries && shape.sees(other, own) : shape.sees(own, other);
            if (!visible) T::score(s, r, w) = -infinity();
        }
}

/// Multiplies weights by the derivatives of limited scores.
template <class T, class Terms>
SLABWISE_INLINE void apply_derivatives(typename T::Scores& weights, typename T::Scores& derivatives) {
    if constexpr (Terms::CAPPED) {
#pragma unroll
        for (int r = 0; r < T::HIGH; ++r)
#pragma unroll
            for (int w = 0; w < T::ACROSS; ++w) T::score(weights, r, w) *= T::score(derivatives, r, w);
    }
}

/// The softmax of rows whose scores come tile by tile.
template <class T, class Terms>
struct Softening {
    /// The largest score so far, and the sum of the powers relative to it that this thread has seen.
    float largest[T::HIGH], sum[T::HIGH];

    SLABWISE_METHOD Softening() {
#pragma unroll
        for (int r = 0; r < T::HIGH; ++r) {
            largest[r] = -infinity();
            sum[r] = 0.0f;
        }
    }
    /// Turns the scores of a tile into powers relative to the largest score so far, and scales the
    /// sums of earlier tiles to it.
    SLABWISE_METHOD void step(typename T::Scores& s, typename T::Result& result) {
#pragma unroll
        for (int r = 0; r < T::HIGH; ++r) {
            float most = largest[r];
#pragma unroll
            for (int w = 0; w < T::ACROSS; ++w) most = fmaxf(most, T::score(s, r, w));
#pragma unroll
            for (int other = T::LANES / 2; other > 0; other /= 2) most = fmaxf(most, from_lane_xor(most, other));
            // While a row has seen nothing, its powers are 0.
            const float base = most == -infinity() ? 0.0f : most;
            const float factor = Terms::power(largest[r] - base);
            largest[r] = most;
            float part = 0.0f;
#pragma unroll
            for (int w = 0; w < T::ACROSS; ++w) {
                const float power = Terms::power(T::score(s, r, w) - base);
                T::score(s, r, w) = power;
                part += power;
            }
            sum[r] = fmaf(sum[r], factor, part);
#pragma unroll
            for (int w = 0; w < T::WIDE; ++w) T::result(result, r, w) *= factor;
        }
    }
    /// Adds the sums of all threads of a row.
    SLABWISE_METHOD void finish() {
#pragma unroll
        for (int r = 0; r < T::HIGH; ++r)
#pragma unroll
            for (int other = T::LANES / 2; other > 0; other /= 2) sum[r] += from_lane_xor(sum[r], other);
    }
};

template <class T>
SLABWISE_INLINE void clear(typename T::Result& result) {
#pragma unroll
    for (int r = 0; r < T::HIGH; ++r)
#pragma unroll
        for (int w = 0; w < T::WIDE; ++w) T::result(result, r, w) = 0.0f;
}

/// Writes rows of a result from `row` on, those before `rows` at rows from `first` on, times a
/// factor for each.
template <class T, class To>
SLABWISE_INLINE void store_result(const To& to, typename T::Result& result, int row, int rows, int width, const float (&factor)[T::HIGH]) {
#pragma unroll
    for (int r = 0; r < T::HIGH; ++r) {
        const int own = row + T::row(r);
        if (own >= rows) continue;
#pragma unroll
        for (int w = 0; w < T::WIDE; w += T::GROUP) {
            float group[T::GROUP];
#pragma unroll
            for (int e = 0; e < T::GROUP; ++e) group[e] = T::result(result, r, w + e) * factor[r];
            to.store(own, T::result_column(w), width, group);
        }
    }
}

/// The results of the queries of tile `tile`.
template <class T, class Shape, class Terms, class Q, class K, class V, class Y>
SLABWISE_INLINE void attention(const Shape& shape, int tile, const Terms& terms, const Q& q, const K& k, const V& v, const Y& y,
                               unsigned char* shared) {
    using E = typename T::Element;
    constexpr int OWN = T::ROWS * T::LEAD, OTHER = T::COLUMNS * T::LEAD;
    E *queries = reinterpret_cast<E*>(shared), *keys = queries + OWN, *values = keys + OTHER;
    float* scratch = reinterpret_cast<float*>(values + OTHER);
    const int row = tile * T::ROWS, from = shape.first_key(row), to = shape.after_keys(min(row + T::ROWS, shape.queries));
    typename T::Result sum;
    clear<T>(sum);
    Softening<T, Terms> softening;
    if (from < to) {
        copy_rows<T::ROWS, T>(queries, q, row, shape.queries, shape.width);
        copy_rows<T::COLUMNS, T>(keys, k, from, shape.keys, shape.width);
        copy_async_commit();
        copy_rows<T::COLUMNS, T>(values, v, from, shape.keys, shape.columns);
        copy_async_commit();
    }
#pragma unroll 1
    for (int at = from; at < to; at += T::COLUMNS) {
        const bool more = at + T::COLUMNS < to;
        copy_async_wait<1>();
        if (at == from) T::template round<T::ROWS>(queries);
        T::template round<T::COLUMNS>(keys);
        __syncthreads();
        typename T::Scores scores, derivatives;
        T::multiply(scores, queries, keys);
        __syncthreads();
        if (more) copy_rows<T::COLUMNS, T>(keys, k, at + T::COLUMNS, shape.keys, shape.width);
        copy_async_commit();
        make_scores<T, false>(scores, derivatives, shape, terms, row, at);
        softening.step(scores, sum);
        copy_async_wait<1>();
        T::template round<T::COLUMNS>(values);
        __syncthreads();
        T::accumulate(sum, scores, values, scratch);
        __syncthreads();
        if (more) copy_rows<T::COLUMNS, T>(values, v, at + T::COLUMNS, shape.keys, shape.columns);
        copy_async_commit();
    }
    copy_async_wait<0>();
    softening.finish();
    // A query that sees no key has a result of NaN.
    float inverse[T::HIGH];
#pragma unroll
    for (int r = 0; r < T::HIGH; ++r) inverse[r] = 1.0f / softening.sum[r];
    store_result<T>(y, sum, row, shape.queries, shape.columns, inverse);
}

/// Three lists of numbers of a head's queries: the largest score, the inverse of the sum of the powers
/// relative to it, and the sum of the results times their gradients.
struct AttentionStatistics {
    float* first;
    u64 apart;

    SLABWISE_METHOD float* at(int list, int query) const { return first + u64(unsigned(list)) * apart + unsigned(query); }
};

/// The sums along rows of y times dy, for the rows of this thread.
template <class T, class Y, class D>
SLABWISE_INLINE void row_sums(float (&sums)[T::HIGH], const Y& y, const D& dy, int row, int rows, int width) {
    const int lane = int(threadIdx.x) % T::LANES;
#pragma unroll
    for (int r = 0; r < T::HIGH; ++r) {
        const int own = row + T::row(r);
        float sum = 0.0f;
        if (own < rows) {
#pragma unroll 2
            for (int c = lane; c < width; c += T::LANES) sum = fmaf(widen(*y.at(own, c)), widen(*dy.at(own, c)), sum);
        }
#pragma unroll
        for (int other = T::LANES / 2; other > 0; other /= 2) sum += from_lane_xor(sum, other);
        sums[r] = sum;
    }
}

/// The gradients of the queries of tile `tile`, and the statistics of these.
template <class T, class Shape, class Terms, class Q, class K, class V, class Y, class D, class R>
SLABWISE_INLINE void attention_query_gradients(const Shape& shape, int tile, const Terms& terms, const Q& q, const K& k, const V& v, const Y& y,
                                               const D& dy, const R& dq, const AttentionStatistics& statistics, unsigned char* shared) {
    using E = typename T::Element;
    constexpr int OWN = T::ROWS * T::LEAD, OTHER = T::COLUMNS * T::LEAD;
    E *queries = reinterpret_cast<E*>(shared), *slopes = queries + OWN, *keys = slopes + OWN, *values = keys + 2 * OTHER;
    float* scratch = reinterpret_cast<float*>(values + OTHER);
    const int row = tile * T::ROWS, from = shape.first_key(row), to = shape.after_keys(min(row + T::ROWS, shape.queries));
    typename T::Result sum;
    clear<T>(sum);
    Softening<T, Terms> softening;
    if (from < to) {
        copy_rows<T::ROWS, T>(queries, q, row, shape.queries, shape.width);
        copy_rows<T::ROWS, T>(slopes, dy, row, shape.queries, shape.width);
        copy_rows<T::COLUMNS, T>(keys, k, from, shape.keys, shape.width);
        copy_async_commit();
        copy_rows<T::COLUMNS, T>(values, v, from, shape.keys, shape.width);
        copy_async_commit();
    }
    float delta[T::HIGH];
    row_sums<T>(delta, y, dy, row, shape.queries, shape.width);
    int now = 0;
#pragma unroll 1
    for (int at = from; at < to; at += T::COLUMNS, now = OTHER - now) {
        const bool more = at + T::COLUMNS < to;
        copy_async_wait<1>();
        if (at == from) {
            T::template round<T::ROWS>(queries);
            T::template round<T::ROWS>(slopes);
        }
        T::template round<T::COLUMNS>(keys + now);
        __syncthreads();
        if (more) copy_rows<T::COLUMNS, T>(keys + OTHER - now, k, at + T::COLUMNS, shape.keys, shape.width);
        copy_async_commit();
        typename T::Scores scores, derivatives, slope;
        T::multiply(scores, queries, keys + now);
        make_scores<T, false>(scores, derivatives, shape, terms, row, at);
        softening.step(scores, sum);
        apply_derivatives<T, Terms>(scores, derivatives);
        copy_async_wait<1>();
        T::template round<T::COLUMNS>(values);
        __syncthreads();
        T::multiply(slope, slopes, values);
        __syncthreads();
        if (more) copy_rows<T::COLUMNS, T>(values, v, at + T::COLUMNS, shape.keys, shape.width);
        copy_async_commit();
#pragma unroll
        for (int r = 0; r < T::HIGH; ++r)
#pragma unroll
            for (int w = 0; w < T::ACROSS; ++w) T::score(scores, r, w) *= T::score(slope, r, w) - delta[r];
        T::accumulate(sum, scores, keys + now, scratch);
    }
    copy_async_wait<0>();
    softening.finish();
    float factor[T::HIGH];
#pragma unroll
    for (int r = 0; r < T::HIGH; ++r) {
        // A query that sees no key has a result of NaN, and no gradient.
        const bool none = softening.sum[r] == 0.0f;
        const float inverse = 1.0f / softening.sum[r];
        const int own = row + T::row(r);
        if (own < shape.queries && int(threadIdx.x) % T::LANES == 0) {
            *statistics.at(0, own) = none ? infinity() : softening.largest[r];
            *statistics.at(1, own) = none ? 0.0f : inverse;
            *statistics.at(2, own) = none ? 0.0f : delta[r];
        }
        factor[r] = none ? 0.0f : shape.scale * inverse;
        if (none) {
#pragma unroll
            for (int w = 0; w < T::WIDE; ++w) T::result(sum, r, w) = 0.0f;
        }
    }
    store_result<T>(dq, sum, row, shape.queries, shape.width, factor);
}

/// The gradients of the keys of tile `tile`, of the values, or of both.
template <class T, bool OF_KEYS, bool OF_VALUES, class Shape, class Terms, class Q, class K, class V, class D, class R>
SLABWISE_INLINE void attention_key_gradients(const Shape& shape, int tile, const Terms& terms, const Q& q, const K& k, const V& v, const D& dy,
                                             const R& dk, const R& dv, const AttentionStatistics& statistics, unsigned char* shared) {
    using E = typename T::Element;
    constexpr int OWN = T::ROWS * T::LEAD, OTHER = T::COLUMNS * T::LEAD;
    E *keys = reinterpret_cast<E*>(shared), *values = keys + OWN, *queries = values + OWN, *slopes = queries + 2 * OTHER;
    float *known = reinterpret_cast<float*>(slopes + OTHER), *scratch = known + 6 * T::COLUMNS;
    const int row = tile * T::ROWS, from = shape.first_query(row), to = shape.after_queries(min(row + T::ROWS, shape.keys));
    // Queries and their statistics, in one of two places.
    const auto copy_queries = [&](int place, int at) {
        copy_rows<T::COLUMNS, T>(queries + place * OTHER, q, at, shape.queries, shape.width);
        for (int i = int(threadIdx.x); i < 3 * T::COLUMNS; i += T::THREADS) {
            const int query = at + i % T::COLUMNS;
            const bool wanted = query < shape.queries;
            copy_async<4>(known + place * 3 * T::COLUMNS + i, statistics.at(i / T::COLUMNS, wanted ? query : 0), wanted);
        }
    };
    typename T::Result of_keys, of_values;
    clear<T>(of_keys);
    clear<T>(of_values);
    if (from < to) {
        copy_rows<T::ROWS, T>(keys, k, row, shape.keys, shape.width);
        copy_rows<T::ROWS, T>(values, v, row, shape.keys, shape.width);
        copy_queries(0, from);
        copy_async_commit();
        copy_rows<T::COLUMNS, T>(slopes, dy, from, shape.queries, shape.width);
        copy_async_commit();
    }
    int now = 0;
#pragma unroll 1
    for (int at = from; at < to; at += T::COLUMNS, now = 1 - now) {
        const bool more = at + T::COLUMNS < to;
        copy_async_wait<1>();
        if (at == from) {
            T::template round<T::ROWS>(keys);
            T::template round<T::ROWS>(values);
        }
        T::template round<T::COLUMNS>(queries + now * OTHER);
        __syncthreads();
        if (more) copy_queries(1 - now, at + T::COLUMNS);
        copy_async_commit();
        const float *largest = known + now * 3 * T::COLUMNS, *inverses = largest + T::COLUMNS, *deltas = inverses + T::COLUMNS;
        typename T::Scores scores, derivatives, slope;
        T::multiply(scores, keys, queries + now * OTHER);
        make_scores<T, true>(scores, derivatives, shape, terms, row, at);
#pragma unroll
        for (int w = 0; w < T::ACROSS; ++w) {
            const float base = largest[T::score_column(w)], inverse = inverses[T::score_column(w)];
#pragma unroll
            for (int r = 0; r < T::HIGH; ++r) T::score(scores, r, w) = Terms::power(T::score(scores, r, w) - base) * inverse;
        }
        copy_async_wait<1>();
        T::template round<T::COLUMNS>(slopes);
        __syncthreads();
        if constexpr (OF_VALUES) T::accumulate(of_values, scores, slopes, scratch);
        apply_derivatives<T, Terms>(scores, derivatives);
        if constexpr (OF_KEYS) T::multiply(slope, values, slopes);
        __syncthreads();
        if (more) copy_rows<T::COLUMNS, T>(slopes, dy, at + T::COLUMNS, shape.queries, shape.width);
        copy_async_commit();
        if constexpr (OF_KEYS) {
#pragma unroll
            for (int w = 0; w < T::ACROSS; ++w) {
                const float delta = deltas[T::score_column(w)];
#pragma unroll
                for (int r = 0; r < T::HIGH; ++r) T::score(scores, r, w) *= T::score(slope, r, w) - delta;
            }
            T::accumulate(of_keys, scores, queries + now * OTHER, scratch);
        }
    }
    copy_async_wait<0>();
    float factor[T::HIGH];
#pragma unroll
    for (int r = 0; r < T::HIGH; ++r) factor[r] = shape.scale;
    if constexpr (OF_KEYS) store_result<T>(dk, of_keys, row, shape.keys, shape.width, factor);
#pragma unroll
    for (int r = 0; r < T::HIGH; ++r) factor[r] = 1.0f;
    if constexpr (OF_VALUES) store_result<T>(dv, of_values, row, shape.keys, shape.width, factor);
}
