// Loading tiles of the operands of convolutions element by element: one side of a tile is located by
// each thread for its own positions, the other by a table in shared memory that all threads read.

/// A position along the side that a table locates: its offset, and a bit for its row and one for its
/// column in the window.
template <class Offset>
struct alignas(2 * sizeof(Offset)) Located {
    Offset offset;
    unsigned bits;
};

static constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }

/// As `Loader`, of single elements of a matrix with a window of HIGH × WIDE elements, which are the
/// inner axes of the side across threads. Each thread keeps which rows and columns of the window lie
/// outside the image at its positions. Along the contracted side, the elements of the window repeat
/// after PERIOD tiles, and so does the table.
template <class M, class Layout, int FREE, int DEEP, int THREADS, bool BY_DEEP>
struct LocatedLoader {
    using E = typename M::Element;
    using S = typename Layout::Element;
    using Spot = typename M::Spot;
    using Entry = Located<typename M::Offset>;
    static constexpr int ALONG = BY_DEEP ? DEEP : FREE, ACROSS = BY_DEEP ? FREE : DEEP;
    static constexpr int TURNS_ALONG = ALONG > THREADS ? ALONG / THREADS : 1;
    static constexpr int ROWS = ALONG > THREADS ? 1 : THREADS / ALONG, TURNS_ACROSS = ACROSS / ROWS;
    static_assert(ACROSS % ROWS == 0, "every thread has as many elements");
    static constexpr int TAPS = M::HIGH * M::WIDE;
    static constexpr int PERIOD = BY_DEEP ? 1 : TAPS / common_divisor(TAPS, DEEP);
    /// The last tile of the contracted side, of which a part is missing, has a table of its own.
    static constexpr int ENTRIES = ACROSS * (BY_DEEP ? 1 : PERIOD + 1);
    static constexpr int SHARED_BYTES = ENTRIES * int(sizeof(Entry));
    static constexpr bool STRAIGHT = Same<E, S>::value && sizeof(E) >= 4;
    /// The bit of positions that do not exist.
    static constexpr unsigned NOWHERE = 1u << 31;
    static_assert(M::HIGH <= 16 && M::WIDE <= 15, "a bit for each row and column, and one for no position");

    const M m;
    int along, across;
    Entry* const table;
    /// The tile within the period, and the thread's positions along the free side.
    int turn;
    const E* first[TURNS_ALONG];
    unsigned outside[TURNS_ALONG];
    S held[STRAIGHT ? 1 : TURNS_ALONG * TURNS_ACROSS];

    /// A loader for the tile whose first row or column is `from`, of `count`, and for contracted
    /// elements `deep..end`. A barrier has to follow.
    SLABWISE_METHOD LocatedLoader(const M& matrix, int from, int count, int deep, int end, void* shared)
        : m(matrix), table(static_cast<Entry*>(shared)) {
        along = int(threadIdx.x) % ALONG;
        across = int(threadIdx.x) / ALONG;
        const int room = count - from;
#pragma unroll 1
        for (int i = int(threadIdx.x); i < ENTRIES; i += THREADS) {
            const int tile = i / ACROSS, at = i % TURNS_ACROSS * ROWS + i % ACROSS / TURNS_ACROSS;
            if constexpr (BY_DEEP) {
                table[i] = {M::Free::at(m.w, from + at).offset, at < room ? bits(from + at) : NOWHERE};
            } else {
                const int k = (tile < PERIOD ? tile : end / DEEP) * DEEP + at;
                table[i] = {M::Deep::at(m.w, k % (PERIOD * DEEP)).offset, tile < PERIOD || k < end ? bits(k) : NOWHERE};
            }
        }
        if constexpr (!BY_DEEP) {
            turn = deep / DEEP % PERIOD;
#pragma unroll
            for (int i = 0; i < TURNS_ALONG; ++i) {
                const int at = along + i * THREADS;
                const Spot spot = M::Free::at(m.w, from + at);
                first[i] = m.first + (spot.offset + deep / (PERIOD * DEEP) * period());
                outside[i] = at < room ? outside_at(spot) : ~0u;
            }
        }
    }
    /// The row and the column in the window of a position across.
    static SLABWISE_METHOD unsigned bits(int at) {
        const int tap = at % TAPS;
        return 1u << tap / M::WIDE | 1u << (16 + tap % M::WIDE);
    }
    /// The offset from a period to the next.
    SLABWISE_METHOD typename M::Offset period() const { return M::Deep::stride(m.w) * (PERIOD * DEEP / TAPS); }
    /// The rows and columns of the window that lie outside the image.
    SLABWISE_METHOD unsigned outside_at(const Spot& spot) const {
        unsigned all = NOWHERE;
        if constexpr (M::IS_WINDOW) {
            using Across = typename Either<BY_DEEP, typename M::Free, typename M::Deep>::Type;
#pragma unroll
            for (int y = 0; y < M::HIGH; ++y)
                if (unsigned(spot.y + Across::row(m.w, y)) >= m.height()) all |= 1u << y;
#pragma unroll
            for (int x = 0; x < M::WIDE; ++x)
                if (unsigned(spot.x + Across::column(m.w, x)) >= m.width()) all |= 1u << (16 + x);
        }
        return all;
    }

    /// The place in a tile of turn `i` along and turn `j` across, at a constant distance from that of
    /// other turns whose chunks are swizzled alike.
    static constexpr int swizzled(int j) { return ROWS % Layout::PERIOD == 0 ? 0 : j * ROWS % Layout::PERIOD; }
    SLABWISE_METHOD S* place(S* tile, int i, int j) const {
        const int at = across + swizzled(j), position = along + i * THREADS;
        constexpr int STEP = BY_DEEP ? Layout::FREE_STEP : Layout::DEEP_STEP;
        return tile + Layout::at(BY_DEEP ? at : position, BY_DEEP ? position : at) + (j * ROWS - swizzled(j)) * STEP;
    }
    /// As of `Loader`; tiles follow each other.
    SLABWISE_METHOD void start(S* tile, int deep, int end) {
        const bool whole = deep + DEEP <= end;
        const Entry* entries = table + across * TURNS_ACROSS + (BY_DEEP ? 0 : (whole ? turn : PERIOD) * ACROSS);
#pragma unroll
        for (int i = 0; i < TURNS_ALONG; ++i) {
            const E* from = m.first;
            unsigned beyond;
            if constexpr (BY_DEEP) {
                const int k = deep + along + i * THREADS;
                const Spot spot = M::Deep::at(m.w, k);
                from = settled(m.first + spot.offset);
                beyond = k < end ? outside_at(spot) : ~0u;
            } else {
                from = first[i];
                beyond = outside[i];
            }
            // Entries are read before copies start, because the compiler does not exchange them.
            constexpr int AT_ONCE = TURNS_ACROSS < 8 ? TURNS_ACROSS : 8;
#pragma unroll
            for (int turn = 0; turn < TURNS_ACROSS; turn += AT_ONCE) {
                Entry some[AT_ONCE];
                if constexpr (AT_ONCE % 2 == 0 && sizeof(Entry) == 8) {
#pragma unroll
                    for (int j = 0; j < AT_ONCE; j += 2) {
                        const auto two = load_vec<Vec<Entry, 2>>(entries + turn + j);
                        some[j] = two.v[0];
                        some[j + 1] = two.v[1];
                    }
                } else {
#pragma unroll
                    for (int j = 0; j < AT_ONCE; ++j) some[j] = entries[turn + j];
                }
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
                    // Nothing is read from an address outside the image.
                    const bool wanted = (beyond & some[j].bits) == 0;
                    const E* element = from + some[j].offset;
                    if constexpr (STRAIGHT) copy_async<sizeof(E)>(place(tile, i, turn + j), element, wanted);
                    else held[i * TURNS_ACROSS + turn + j] = wanted ? converted<S>(*element) : S{};
                }
            }
        }
        if constexpr (!BY_DEEP) {
            if (++turn == PERIOD) {
                turn = 0;
#pragma unroll
                for (int i = 0; i < TURNS_ALONG; ++i) first[i] += period();
            }
        }
    }
    /// Stores the elements held in registers.
    SLABWISE_METHOD void finish(S* tile) {
        if constexpr (!STRAIGHT) {
#pragma unroll
            for (int i = 0; i < TURNS_ALONG; ++i)
#pragma unroll
                for (int j = 0; j < TURNS_ACROSS; ++j) *place(tile, i, j) = held[i * TURNS_ACROSS + j];
        }
    }
};

/// The loader of a matrix.
template <bool IS_LOCATED, class M, class Layout, int FREE, int DEEP, int THREADS, bool BY_DEEP, int V>
struct LoaderFor {
    using Type = Loader<M, Layout, FREE, DEEP, THREADS, BY_DEEP, V>;
};
template <class M, class Layout, int FREE, int DEEP, int THREADS, bool BY_DEEP, int V>
struct LoaderFor<true, M, Layout, FREE, DEEP, THREADS, BY_DEEP, V> {
    using Type = LocatedLoader<M, Layout, FREE, DEEP, THREADS, BY_DEEP>;
};
template <class M, class Layout, int FREE, int DEEP, int THREADS, bool BY_DEEP, int V>
using LoaderOf = typename LoaderFor<M::HIGH != 0 && V == 1, M, Layout, FREE, DEEP, THREADS, BY_DEEP, V>::Type;
