// Loading tiles of the operands of convolutions element by element: one side of a tile is located by
// each thread for its own positions, the other by a table in shared memory that all threads read.

static constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }

/// As `Loader`, of single elements of a matrix with a window of HIGH × WIDE elements, which are the
/// inner axes of the side across threads. The table has the offsets of that side; along the
/// contracted side, the elements of the window repeat after PERIOD tiles, and so does the table.
/// Each thread has a bit for each of its elements, which says whether it lies in the image. Halves,
/// which registers hold, are stored by vectors: in a tile, elements across threads are contiguous.
template <class M, class Layout, int FREE, int DEEP, int THREADS, bool BY_DEEP>
struct LocatedLoader {
    using E = typename M::Element;
    using S = typename Layout::Element;
    using Spot = typename M::Spot;
    using Offset = typename M::Offset;
    static constexpr int ALONG = BY_DEEP ? DEEP : FREE, ACROSS = BY_DEEP ? FREE : DEEP;
    static constexpr int TURNS_ALONG = ALONG > THREADS ? ALONG / THREADS : 1;
    static constexpr int ROWS = ALONG > THREADS ? 1 : THREADS / ALONG, TURNS = ACROSS / ROWS;
    static_assert(ACROSS % ROWS == 0 && TURNS % 4 == 0 && TURNS <= 32, "every thread has as many elements, with a bit each");
    static_assert(!BY_DEEP || TURNS_ALONG == 1, "neighbours along the contracted axis are few");
    /// Whether elements are copied directly to shared memory; otherwise registers hold them, and
    /// each thread has neighbours across threads, not every ROWS-th element.
    static constexpr bool STRAIGHT = sizeof(E) == 4;
    static constexpr int STEP = STRAIGHT ? ROWS : 1;
    static constexpr int TAPS = M::HIGH * M::WIDE;
    static constexpr int PERIOD = BY_DEEP ? 1 : TAPS / common_divisor(TAPS, DEEP);
    /// The distance of neighbours across threads, if it is known: then there is no table.
    static constexpr int STRIDE = BY_DEEP ? M::STRIDE : 0;
    static constexpr int ENTRIES = STRIDE != 0 ? 0 : ACROSS * PERIOD;
    /// Entries of the bits of a thread's elements in the window's rows, or columns, that lie in the
    /// image, for every part of the window that can: none above, all in between, and none below.
    static constexpr int HIGH_PARTS = 2 * M::DOWN + 3, WIDE_PARTS = 2 * M::OVER + 3, PARTS = HIGH_PARTS + WIDE_PARTS;
    static constexpr bool HAS_PARTS = BY_DEEP && M::IS_WINDOW;
    static constexpr int SHARED_BYTES = ENTRIES * int(sizeof(Offset)) + (HAS_PARTS ? ROWS * PARTS * 4 : 0);
    /// The elements of the window repeat after so many elements of a thread.
    static constexpr int CYCLE = TAPS / common_divisor(TAPS, STEP);
    static_assert(Same<E, S>::value, "elements are not converted");
    static constexpr int logarithm(int n) { return n > 1 ? 1 + logarithm(n / 2) : 0; }

    /// Bits of elements to come; so many repetitions of the window are whole.
    using Bits = typename Either<(32 / CYCLE * CYCLE >= TURNS), unsigned, u64>::Type;
    static constexpr int BITS = 8 * int(sizeof(Bits)) / CYCLE * CYCLE, SHIFT = DEEP / STEP % CYCLE;
    static_assert(BITS >= TURNS, "a bit for each element of a thread");
    /// Vectors of halves that a thread stores, and elements in them.
    static constexpr int V = 8, VECTORS = TURNS_ALONG * TURNS / V;

    const M m;
    int along, across;
    /// The first element of this thread's, if there is no table, or of the matrix.
    const E* const origin;
    const Shared table;
    const Places<Layout, ROWS, TURNS, BY_DEEP> places;
    /// The end of the contracted axis, for the number of a thread's elements before it.
    const int last;
    /// The tile within the period.
    int turn;
    /// The thread's positions along the free side, and bits of its elements from this tile on.
    const E* first[TURNS_ALONG];
    Bits inside[TURNS_ALONG];
    /// Bits of the thread's elements across threads that exist, and where those of parts of the
    /// window begin.
    unsigned exist;
    const Shared parts;
    unsigned held[STRAIGHT ? 1 : TURNS_ALONG * TURNS];
    Shared vectors[STRAIGHT ? 1 : TURNS / V];

    /// A loader for the tile whose first row or column is `from`, of `count`, at `tile` in the first
    /// stage, and for contracted elements `deep..end`. A barrier has to follow.
    SLABWISE_METHOD LocatedLoader(const M& matrix, Shared tile, int from, int count, int deep, int end, void* shared)
        : m(matrix),
          along(int(threadIdx.x) % ALONG),
          across(int(threadIdx.x) / ALONG),
          origin(settled(STRIDE != 0 ? m.first + M::Free::at(m.w, from + across_at(across, 0)).offset : m.first)),
          table(settled(Shared(shared) + across * TURNS * int(sizeof(Offset)))),
          places(tile, along, across),
          last(settled(STRAIGHT ? end - across + ROWS - 1 : end - across * TURNS)),
          parts(settled(Shared(static_cast<char*>(shared) + ENTRIES * int(sizeof(Offset))) + across * PARTS * 4)) {
        const int room = count - from;
        Offset* const offsets = static_cast<Offset*>(shared);
#pragma unroll 1
        for (int i = int(threadIdx.x); i < ENTRIES; i += THREADS) {
            const int at = across_at(i % ACROSS / TURNS, i % TURNS);
            if constexpr (BY_DEEP) offsets[i] = M::Free::at(m.w, from + at).offset;
            else offsets[i] = M::Deep::at(m.w, i / ACROSS * DEEP + at).offset;
        }
        if constexpr (BY_DEEP) {
            exist = low_bits(STRAIGHT ? (max(room - across, 0) + ROWS - 1) / ROWS : max(room - across * TURNS, 0));
            if constexpr (HAS_PARTS) {
                unsigned* const bits = reinterpret_cast<unsigned*>(offsets + ENTRIES);
#pragma unroll 1
                for (int i = int(threadIdx.x); i < ROWS * PARTS; i += THREADS) {
                    const int part = i % PARTS;
                    bits[i] = part < HIGH_PARTS ? row_bits(from, i / PARTS, part) : column_bits(from, i / PARTS, part - HIGH_PARTS);
                }
            }
        } else {
            turn = deep / DEEP % PERIOD;
#pragma unroll
            for (int i = 0; i < TURNS_ALONG; ++i) {
                const int at = along + i * THREADS;
                const Spot spot = M::Free::at(m.w, from + at);
                first[i] = origin + (spot.offset + deep / (PERIOD * DEEP) * period());
                inside[i] = at < room ? inside_from(spot, deep) : 0;
            }
        }
        if constexpr (!STRAIGHT) {
#pragma unroll
            for (int c = 0; c < TURNS / V; ++c) {
                const int at = across * TURNS + c * V;
                vectors[c] = settled(tile + int(sizeof(S)) * Layout::at(BY_DEEP ? at : along, BY_DEEP ? along : at));
            }
        }
    }
    /// The position across of a thread's element `j`.
    static SLABWISE_METHOD int across_at(int across, int j) { return STRAIGHT ? across + j * ROWS : across * TURNS + j; }
    /// The offset from a period to the next.
    SLABWISE_METHOD Offset period() const { return M::Deep::stride(m.w) * (PERIOD * DEEP / TAPS); }
    /// Whether a row or a column of the window lies in the image.
    template <class Across>
    SLABWISE_METHOD bool has_row(int first, int y) const { return unsigned(first + Across::rows(m.w, y)) < m.height(); }
    template <class Across>
    SLABWISE_METHOD bool has_column(int first, int x) const { return unsigned(first + Across::columns(m.w, x)) < m.width(); }
    /// A window whose first row or column is `first` and that spans `span` more, before it if its
    /// steps are negative, in an image of `size`: the number of its part, from none above to none
    /// below. Parts in between are one.
    static SLABWISE_METHOD int part(int first, int step, int span, int size) {
        const int low = step < 0 ? first - span : first, between = max(size - 1 - span, 0);
        return int(min(unsigned(min(low, 0) + max(low - between, 0) + (span + 1)), unsigned(2 * span + 2)));
    }
    /// The first row or column of the window in such a part.
    static SLABWISE_METHOD int first_of(int part, int step, int span, int size) {
        const int low = part - (span + 1);
        return (low > 0 ? low + max(size - 1 - span, 0) : low) + (step < 0 ? span : 0);
    }
    SLABWISE_METHOD unsigned row_bits(int from, int across, int part) const {
        const int first = first_of(part, M::Free::rows(m.w, 1), M::DOWN, int(m.height()));
        unsigned bits = 0;
#pragma unroll 1
        for (int j = 0; j < TURNS; ++j)
            if (has_row<typename M::Free>(first, (from + across_at(across, j)) % TAPS / M::WIDE)) bits |= 1u << j;
        return bits;
    }
    SLABWISE_METHOD unsigned column_bits(int from, int across, int part) const {
        const int first = first_of(part, M::Free::columns(m.w, 1), M::OVER, int(m.width()));
        unsigned bits = 0;
#pragma unroll 1
        for (int j = 0; j < TURNS; ++j)
            if (has_column<typename M::Free>(first, (from + across_at(across, j)) % M::WIDE)) bits |= 1u << j;
        return bits;
    }
    /// The bits of a position's elements from contracted element `deep` on.
    SLABWISE_METHOD Bits inside_from(const Spot& spot, int deep) const {
        Bits bits = 0;
        if constexpr (!M::IS_WINDOW) return ~bits;
        else {
            int tap = (deep + across_at(across, 0)) % TAPS;
#pragma unroll 1
            for (int i = 0; i < CYCLE; ++i, tap = (tap + STEP) % TAPS)
                if (has_row<typename M::Deep>(spot.y, tap / M::WIDE) && has_column<typename M::Deep>(spot.x, tap % M::WIDE)) bits |= Bits(1) << i;
#pragma unroll
            for (int have = CYCLE; have < 8 * int(sizeof(Bits)); have *= 2) bits |= bits << have;
            return bits;
        }
    }
    /// The bits of the elements of the thread's position `spot` along the contracted side.
    SLABWISE_METHOD unsigned inside_at(const Spot& spot) const {
        if constexpr (!M::IS_WINDOW) return exist;
        else {
            const int row = part(spot.y, M::Free::rows(m.w, 1), M::DOWN, int(m.height()));
            const int column = part(spot.x, M::Free::columns(m.w, 1), M::OVER, int(m.width()));
            return load_one(parts + row * 4) & load_one(parts + (HIGH_PARTS + column) * 4) & exist;
        }
    }
    /// As of `Loader`; tiles follow each other.
    SLABWISE_METHOD void start(int stage, int deep, int end) {
        [[maybe_unused]] const Shared entries = table + (BY_DEEP ? 0 : turn * (ACROSS * int(sizeof(Offset))));
        constexpr int AT_ONCE = TURNS < 16 ? TURNS : 16, SOME = 16 / int(sizeof(Offset));
#pragma unroll
        for (int i = 0; i < TURNS_ALONG; ++i) {
            const E* from;
            unsigned bits;
            if constexpr (BY_DEEP) {
                const int k = deep + along;
                const Spot spot = M::Deep::at(m.w, k);
                from = settled(origin + spot.offset);
                bits = inside_at(spot);
                bits = k < end ? bits : 0u;
            } else {
                from = first[i];
                bits = unsigned(inside[i]) & bits_from(deep);
            }
            // Entries are read before copies start, because the compiler does not exchange them.
#pragma unroll
            for (int at = 0; at < TURNS; at += AT_ONCE) {
                unsigned some[AT_ONCE / SOME][4];
                if constexpr (STRIDE == 0) {
#pragma unroll
                    for (int j = 0; j < AT_ONCE; j += SOME) load_four(some[j / SOME], entries + (at + j) * int(sizeof(Offset)));
                }
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
                    // Nothing is read from an address outside the image.
                    const unsigned wanted = bits & 1u << (at + j);
                    const E* element;
                    if constexpr (STRIDE != 0) element = from + (at + j) * (STEP * STRIDE);
                    else element = from + offset(some[j / SOME], j % SOME);
                    if constexpr (STRAIGHT) {
                        copy_async<sizeof(E)>(places.at(stage, at + j) + i * THREADS * int(sizeof(S)), element, wanted);
                    } else {
                        unsigned half = 0;
                        if (wanted != 0) half = element->bits;
                        held[i * TURNS + at + j] = half;
                    }
                }
            }
        }
        if constexpr (!BY_DEEP) {
#pragma unroll
            for (int i = 0; i < TURNS_ALONG; ++i)
                if constexpr (SHIFT != 0) inside[i] = inside[i] >> SHIFT | inside[i] << (BITS - SHIFT);
            const Offset after = settled(period());
            if (++turn == PERIOD) {
                turn = 0;
#pragma unroll
                for (int i = 0; i < TURNS_ALONG; ++i) first[i] += after;
            }
        }
    }
    /// The bits of the thread's elements in a tile from contracted element `deep` on that exist.
    SLABWISE_METHOD unsigned bits_from(int deep) const {
        const int left = (last - deep) >> logarithm(STEP);
        return low_bits(STRAIGHT ? left : max(left, 0));
    }
    /// The offset of number `i` in an entry of 16 bytes.
    static SLABWISE_METHOD Offset offset(const unsigned (&some)[4], int i) {
        if constexpr (sizeof(Offset) == 4) return Offset(some[i]);
        else return Offset(u64(some[2 * i + 1]) << 32 | some[2 * i]);
    }
    /// Stores the elements held in registers.
    SLABWISE_METHOD void finish(int stage) {
        if constexpr (!STRAIGHT) {
            constexpr int DISTANCE = THREADS * int(sizeof(S)) * Layout::FREE_STEP;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                unsigned words[4];
#pragma unroll
                for (int word = 0; word < 4; ++word) words[word] = pair_of(held[V * i + 2 * word], held[V * i + 2 * word + 1]);
                store_four(vectors[i % (TURNS / V)] + stage + i / (TURNS / V) * DISTANCE, words);
            }
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
