// Sums over the rows of a product's result, one for each column, of values of its epilogue: each
// block sums the rows of its tile, and the last blocks to arrive add the sums of all tiles in their
// order.

/// The sums of some rows of a column: SUMS plain ones, then mean and squared deviations from it for
/// each of SPREADS values.
template <int SUMS, int SPREADS>
struct Totals {
    static constexpr int WORDS = SUMS + 2 * SPREADS;
    float of[WORDS];
    /// The number of rows.
    int count;

    /// Adds those of other rows, of which there is at least one, as there is here (Chan, Golub and
    /// LeVeque, *Updating Formulae and a Pairwise Algorithm for Computing Sample Variances*, 1979).
    SLABWISE_METHOD void join(const Totals& next) {
        const float part = float(next.count) / float(count + next.count), both = float(count) * part;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) of[i] += next.of[i];
#pragma unroll
        for (int i = SUMS; i < WORDS; i += 2) {
            const float apart = next.of[i] - of[i];
            of[i] += apart * part;
            of[i + 1] += next.of[i + 1] + apart * apart * both;
        }
        count += next.count;
    }
};

/// The sums of a thread, all of one column, in the order of its rows. Deviations are from the first
/// row, which is one of `count`: cancellation costs at most a factor of `count` in rounding.
template <int SUMS, int SPREADS>
struct ThreadTotals {
    float sums[SUMS == 0 ? 1 : SUMS] = {}, first[SPREADS == 0 ? 1 : SPREADS] = {};
    float deviations[SPREADS == 0 ? 1 : SPREADS] = {}, squares[SPREADS == 0 ? 1 : SPREADS] = {};
    int count = 0;

    template <int I>
    SLABWISE_METHOD void add(float x) { sums[I] += x; }
    template <int I>
    SLABWISE_METHOD void spread(float x) {
        if (count == 0) first[I] = x;
        const float apart = x - first[I];
        deviations[I] += apart;
        squares[I] = fmaf(apart, apart, squares[I]);
    }
    SLABWISE_METHOD Totals<SUMS, SPREADS> totals() const {
        Totals<SUMS, SPREADS> result;
        result.count = count;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) result.of[i] = sums[i];
#pragma unroll
        for (int i = 0; i < SPREADS; ++i) {
            const float mean = deviations[i] / float(count), rest = squares[i] - deviations[i] * mean;
            result.of[SUMS + 2 * i] = first[i] + mean;
            // Rounding may give less than 0; NaN stays.
            result.of[SUMS + 2 * i + 1] = rest < 0.0f ? 0.0f : rest;
        }
        return result;
    }
};

/// Adds the sums of the threads of all blocks, which have tiles of ROWS × COLUMNS, and passes those
/// of each column to `take(column, totals)`, in one block for each tile of columns. Blocks of `group`
/// neighbouring tiles are added first. `partial` has WORDS × COLUMNS floats for each tile; of
/// `counters` each tile of columns has one and one for each group.
template <int THREADS, int ROWS, int COLUMNS, int SUMS, int SPREADS, class Share, class Take>
SLABWISE_INLINE void finish_totals(const ThreadTotals<SUMS, SPREADS>& own, const Share& share, float* shared, float* partial,
                                   unsigned* counters, int group, Take take) {
    using All = Totals<SUMS, SPREADS>;
    constexpr int WORDS = All::WORDS, EACH = THREADS / COLUMNS, SIZE = WORDS * COLUMNS;
    static_assert(THREADS % COLUMNS == 0, "all elements of a thread are of one column");
    const int thread = int(threadIdx.x);
    All total = own.totals();
    if constexpr (EACH > 1) {
        int* const counts = reinterpret_cast<int*>(shared + WORDS * THREADS);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) shared[i * THREADS + thread] = total.of[i];
        counts[thread] = total.count;
        __syncthreads();
        if (thread < COLUMNS) {
#pragma unroll
            for (int from = thread + COLUMNS; from < THREADS; from += COLUMNS) {
                All next;
#pragma unroll
                for (int i = 0; i < WORDS; ++i) next.of[i] = shared[i * THREADS + from];
                next.count = counts[from];
                if (next.count > 0) total.join(next);
            }
        }
    }
    const int down = (share.rows + ROWS - 1) / ROWS, tile = share.row / ROWS, groups = (down + group - 1) / group;
    float* const first = partial + (long long)(share.column / COLUMNS) * down * SIZE + thread;
    unsigned* const counter = counters + share.column / COLUMNS * (1 + groups);
    const auto store = [&](int at) {
        if (thread < COLUMNS) {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) first[(long long)(at) * SIZE + i * COLUMNS] = total.of[i];
        }
    };
    // Adds `members` sums, of `each` tiles, from that of a tile on.
    const auto gather = [&](int from, int members, int each) {
        // As many loads at once as leave registers: a block waits for each round of them.
        constexpr int AT_ONCE = WORDS <= 2 ? 16 : WORDS <= 4 ? 8 : 4;
        if (thread >= COLUMNS) return;
#pragma unroll 1
        for (int i = 0; i < members; i += AT_ONCE) {
            All next[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int at = from + (i + j) * each;
                next[j].count = min(share.rows - at * ROWS, each * ROWS);
                if (i + j >= members) continue;
#pragma unroll
                for (int k = 0; k < WORDS; ++k) next[j].of[k] = load_written<Vec<float, 1>>(first + (long long)(at) * SIZE + k * COLUMNS).v[0];
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                if (i + j == 0) total = next[0];
                else if (i + j < members) total.join(next[j]);
            }
        }
    };
    if (down > 1) {
        const int from = tile / group * group, members = min(group, down - from);
        store(tile);
        if (!have_arrived(counter + 1 + tile / group, members)) return;
        gather(from, members, 1);
        if (groups > 1) {
            // All blocks of the group have stored their sums, and none reads the first's any more.
            store(from);
            if (!have_arrived(counter, groups)) return;
            gather(0, groups, group);
        }
    }
    if (thread < COLUMNS && share.column + thread < share.columns) take(share.column + thread, total);
}
