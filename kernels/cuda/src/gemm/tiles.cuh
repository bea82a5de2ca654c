// Code shared by all tiled products: loading tiles of both operands to shared memory, and assigning
// tiles to blocks.

/// A tile in shared memory for register tiling: the free elements of one step of the contracted
/// axis are contiguous. The four elements of padding spread a column over the banks.
template <int FREE, int DEEP>
struct Steps {
    using Element = float;
    static constexpr int SIZE = DEEP * (FREE + 4);
    /// Places at a distance of PERIOD are swizzled alike; elements from one free or contracted
    /// element to the next.
    static constexpr int PERIOD = 1, FREE_STEP = 1, DEEP_STEP = FREE + 4;
    static SLABWISE_METHOD int at(int free, int deep) { return deep * (FREE + 4) + free; }
};

/// A tile for tensor cores, contracted elements contiguous, 64 bytes of them for each free element;
/// if there are 128, the others follow behind all of the first, 64 bytes further, so that both
/// halves of a row lie in different banks. Chunks of 16 bytes are swizzled so that the eight rows
/// of a matrix that `ldmatrix` reads do, too.
template <class E, int FREE, int DEEP>
struct DeepRows {
    using Element = E;
    static constexpr int CHUNK = 16 / sizeof(E), CHUNKS = DEEP / CHUNK, ROW = 4 * CHUNK;
    static_assert(CHUNKS == 4 || CHUNKS == 8, "rows of 64 or 128 bytes");
    /// Elements from the first half of a row to the second.
    static constexpr int HALF = FREE * ROW + ROW, SIZE = CHUNKS == 8 ? 2 * HALF : FREE * ROW;
    /// As of `Steps`, along the free elements.
    static constexpr int PERIOD = 8, FREE_STEP = ROW, DEEP_STEP = 0;
    static SLABWISE_METHOD int at(int free, int deep) {
        const int chunk = deep / CHUNK;
        return chunk / 4 * HALF + free * ROW + ((chunk % 4) ^ ((free >> 1) & 3)) * CHUNK + deep % CHUNK;
    }
};

/// A tile for tensor cores, free elements contiguous, in chunks swizzled for the same reason: the
/// rows of 128 bytes, or those that fill 128 bytes together, are swizzled alike.
template <class E, int FREE, int DEEP>
struct FreeRows {
    using Element = E;
    static constexpr int SIZE = FREE * DEEP, CHUNK = 16 / sizeof(E);
    /// As of `Steps`, along the contracted elements.
    static constexpr int PERIOD = sizeof(E) == 2 ? 8 : 4, FREE_STEP = 0, DEEP_STEP = FREE;
    static constexpr int CHUNKS = FREE / CHUNK < 8 ? FREE / CHUNK : 8, ALIKE = 8 / CHUNKS;
    static_assert(FREE % CHUNK == 0 && CHUNKS * ALIKE == 8 && CHUNKS >= (sizeof(E) == 2 ? 2 : 4), "rows of 16 elements at least, a power of two of chunks");
    static SLABWISE_METHOD int at(int free, int deep) {
        const int turn = deep % PERIOD / ALIKE, swap = sizeof(E) == 2 ? turn : turn * 2;
        return deep * FREE + ((free / CHUNK) ^ swap) * CHUNK + free % CHUNK;
    }
};

/// An element as the type of a tile's elements.
template <class S, class E>
SLABWISE_INLINE S converted(E x) {
    if constexpr (Same<E, S>::value) return x;
    else return widen(x);
}

/// The places of a thread's elements in the tile of the first stage: those of turn `j` across, ROWS
/// positions after that before. Places whose chunks are swizzled alike have constant distances.
template <class Layout, int ROWS, int TURNS, bool BY_DEEP>
struct Places {
    static constexpr int KINDS = ROWS % Layout::PERIOD == 0 ? 1 : Layout::PERIOD / ROWS < TURNS ? Layout::PERIOD / ROWS : TURNS;
    static constexpr int ELEMENT = sizeof(typename Layout::Element);

    Shared first[KINDS];

    SLABWISE_METHOD Places(Shared tile, int along, int across) {
#pragma unroll
        for (int i = 0; i < KINDS; ++i) {
            const int at = across + i * ROWS;
            first[i] = settled(tile + ELEMENT * Layout::at(BY_DEEP ? at : along, BY_DEEP ? along : at));
        }
    }
    /// The place in the tile of the stage that is `stage` bytes from the first.
    SLABWISE_METHOD Shared at(int stage, int j) const {
        return first[j % KINDS] + stage + j / KINDS * KINDS * ROWS * (BY_DEEP ? Layout::FREE_STEP : Layout::DEEP_STEP) * ELEMENT;
    }
};

/// The part of one thread in loading tiles of FREE × DEEP elements to shared memory. Neighbouring
/// threads load neighbours along the contracted axis (BY_DEEP) or the free one; V elements at a
/// time. Elements outside the matrix are loaded as zeros.
template <class M, class Layout, int FREE, int DEEP, int THREADS, bool BY_DEEP, int V>
struct Loader {
    using E = typename M::Element;
    using S = typename Layout::Element;
    using Spot = typename M::Spot;
    /// Positions along the axis that neighbouring threads share, and across it.
    static constexpr int ALONG = (BY_DEEP ? DEEP : FREE) / V, ACROSS = BY_DEEP ? FREE : DEEP;
    static constexpr int TURNS_ALONG = ALONG > THREADS ? ALONG / THREADS : 1;
    static constexpr int ROWS = ALONG > THREADS ? 1 : THREADS / ALONG;
    static constexpr int TURNS_ACROSS = (ACROSS + ROWS - 1) / ROWS;
    static constexpr int FREE_SPOTS = BY_DEEP ? TURNS_ACROSS : TURNS_ALONG, DEEP_SPOTS = BY_DEEP ? TURNS_ALONG : TURNS_ACROSS;
    /// Whether elements are copied directly to shared memory; otherwise registers hold them for
    /// conversion.
    static constexpr bool STRAIGHT = Same<E, S>::value && sizeof(E) * V >= 4;

    static_assert(!BY_DEEP || TURNS_ALONG == 1, "neighbours along the contracted axis are few");

    const M m;
    /// The tile of the first stage.
    const Shared tile;
    /// The tile's first row or column, and the number of rows or columns from there on.
    int from, room;
    int along, across;
    /// The first element of the matrix, and those of the thread's positions along the free side.
    const E* const origin;
    const E* starts[BY_DEEP ? 1 : FREE_SPOTS];
    /// Bits of the rows or columns across threads that exist.
    unsigned exist;
    const Places<Layout, ROWS, TURNS_ACROSS, BY_DEEP> places;
    bool whole;
    Spot free[FREE_SPOTS];
    S held[STRAIGHT ? 1 : TURNS_ALONG * TURNS_ACROSS];

    static constexpr int SHARED_BYTES = 0;

    /// A loader for the tile whose first row or column is `from`, of `count`, at `tile` in the first
    /// stage.
    SLABWISE_METHOD Loader(const M& matrix, Shared tile, int from, int count, int = 0, int = 0, void* = nullptr)
        : m(matrix),
          tile(tile),
          from(from),
          room(count - from),
          along(int(threadIdx.x) % ALONG),
          across(int(threadIdx.x) / ALONG),
          origin(settled(m.first)),
          places(tile, along * V, across) {
        whole = V > 1 && m.whole();
#pragma unroll
        for (int i = 0; i < FREE_SPOTS; ++i) {
            free[i] = M::Free::at(m.w, from + free_at(i));
            if constexpr (!BY_DEEP) starts[i] = settled(origin + free[i].offset);
        }
        exist = low_bits(BY_DEEP ? (max(room - across, 0) + ROWS - 1) / ROWS : 0);
    }
    SLABWISE_METHOD int along_at(int i) const { return (along + i * THREADS) * V; }
    SLABWISE_METHOD int across_at(int j) const { return across + j * ROWS; }
    SLABWISE_METHOD int free_at(int i) const { return BY_DEEP ? across_at(i) : along_at(i); }
    SLABWISE_METHOD int deep_at(int i) const { return BY_DEEP ? along_at(i) : across_at(i); }

    /// The place in a stage's tile of turn `i` along and turn `j` across.
    SLABWISE_METHOD Shared place(int stage, int i, int j) const { return places.at(stage, j) + i * THREADS * V * int(sizeof(S)); }

    /// Starts to load the tile whose contracted elements are `deep..` before `end`, to a stage that
    /// is `stage` bytes from the first.
    SLABWISE_METHOD void start(int stage, int deep, int end) {
        if (V > 1 && !whole) {
#pragma unroll 1
            for (int turn = 0; turn < TURNS_ALONG * TURNS_ACROSS; ++turn) apart(stage, turn / TURNS_ACROSS, turn % TURNS_ACROSS, deep, end);
            return;
        }
        Spot steps[DEEP_SPOTS];
        const E* bases[DEEP_SPOTS];
#pragma unroll
        for (int i = 0; i < DEEP_SPOTS; ++i) {
            steps[i] = M::Deep::at(m.w, deep + deep_at(i));
            bases[i] = settled(origin + steps[i].offset);
        }
        const unsigned bits = BY_DEEP ? (deep + along_at(0) < end ? exist : 0u) : 0u;
        const int left_across = settled(end - deep - across);
#pragma unroll
        for (int i = 0; i < TURNS_ALONG; ++i) {
#pragma unroll
            for (int j = 0; j < TURNS_ACROSS; ++j) {
                if (ACROSS % ROWS != 0 && across_at(j) >= ACROSS) continue;
                const int f = BY_DEEP ? j : i, d = BY_DEEP ? i : j;
                unsigned wanted = BY_DEEP ? bits & 1u << j : free_at(f) < room && j * ROWS < left_across;
                if constexpr (M::IS_WINDOW) wanted = wanted != 0 && m.inside(free[f], steps[d]);
                // Nothing is read from an address outside the matrix.
                const E* element;
                if constexpr (BY_DEEP) element = bases[d] + settled(free[f].offset);
                else element = starts[f] + steps[d].offset;
                const Shared to = place(stage, i, j);
                if constexpr (V > 1 && M::PARTIAL) {
                    const int left = BY_DEEP ? end - deep - deep_at(d) : room - free_at(f);
                    copy_async_part(to, wanted != 0 ? element : origin, wanted != 0 ? min(left, V) * int(sizeof(E)) : 0);
                } else if constexpr (STRAIGHT) copy_async<sizeof(E) * V>(to, element, wanted);
                else held[i * TURNS_ACROSS + j] = wanted != 0 ? converted<S>(*element) : S{};
            }
        }
    }
    /// Stores the elements held in registers.
    SLABWISE_METHOD void finish(int stage) {
        if constexpr (!STRAIGHT) {
#pragma unroll
            for (int i = 0; i < TURNS_ALONG; ++i) {
#pragma unroll
                for (int j = 0; j < TURNS_ACROSS; ++j) {
                    if (ACROSS % ROWS != 0 && across_at(j) >= ACROSS) continue;
                    store_element(place(stage, i, j), held[i * TURNS_ACROSS + j]);
                }
            }
        }
    }
    /// One iteration element by element, where vectors would not be aligned or not whole.
    SLABWISE_METHOD void apart(int stage, int i, int j, int deep, int end) const {
        if (across_at(j) >= ACROSS) return;
        const int f = BY_DEEP ? across_at(j) : along_at(i), d = BY_DEEP ? along_at(i) : across_at(j);
        const Shared to = tile + stage + Layout::at(f, d) * int(sizeof(S));
#pragma unroll 1
        for (int e = 0; e < V; ++e) {
            const int row = f + (BY_DEEP ? 0 : e), k = deep + d + (BY_DEEP ? e : 0);
            const Spot spot = M::Free::at(m.w, from + row), step = M::Deep::at(m.w, k);
            const bool wanted = row < room && k < end && m.inside(spot, step);
            const E* element = m.address(spot, step);
            if constexpr (sizeof(E) == 4) copy_async<4>(to + e * int(sizeof(S)), element, wanted);
            else store_element(to + e * int(sizeof(S)), wanted ? converted<S>(*element) : S{});
        }
    }
};

/// Starts to load tiles of both operands: first the one located by a table, which is read before
/// copies start.
template <class LeftLoader, class RightLoader>
SLABWISE_INLINE void start_both(LeftLoader& left, RightLoader& right, int stage, int deep, int end) {
    constexpr bool RIGHT_FIRST = LeftLoader::SHARED_BYTES == 0;
    if constexpr (RIGHT_FIRST) right.start(stage, deep, end);
    left.start(stage, deep, end);
    if constexpr (!RIGHT_FIRST) right.start(stage, deep, end);
}

/// Iterates over the contracted axis from `deep` to `end`: while one tile is multiplied, the next
/// ones are being loaded, to one of STAGES stages of BYTES each, which have a tile of each operand.
/// `multiply` gets the bytes from the first stage to theirs. Afterwards no copy is in flight, and
/// shared memory is free for other use.
template <int STAGES, int BYTES, int DEEP, class LeftLoader, class RightLoader, class Multiply>
SLABWISE_INLINE void walk(LeftLoader& left, RightLoader& right, int deep, int end, Multiply multiply) {
    constexpr int LAST = (STAGES - 1) * BYTES;
    int ahead = deep;
#pragma unroll 1
    for (int stage = 0; stage < LAST; stage += BYTES, ahead += DEEP) {
        if (ahead < end) {
            start_both(left, right, stage, ahead, end);
            left.finish(stage);
            right.finish(stage);
        }
        copy_async_commit();
    }
    int read = 0, write = LAST;
#pragma unroll 1
    for (; deep < end; deep += DEEP) {
        // This thread's part of the next tile has arrived; after the barrier all parts have, and
        // the tile before it is no longer read.
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        ahead = deep + (STAGES - 1) * DEEP;
        const bool more = ahead < end;
        if (more) start_both(left, right, write, ahead, end);
        copy_async_commit();
        multiply(read);
        if (more) {
            left.finish(write);
            right.finish(write);
        }
        write = read;
        read = read == LAST ? 0 : read + BYTES;
    }
    copy_async_wait<0>();
    __syncthreads();
}

/// The tile, the product and the part of the contracted axis of this block. Words from AT on: rows,
/// columns and length of the contracted axis, number of products, length of a part, number of parts.
template <int AT, int ROWS, int COLUMNS>
struct Share {
    int row, column, rows, columns, batch, deep, end;

    SLABWISE_METHOD Share(const u64* w) : rows(int(w[AT])), columns(int(w[AT + 1])) {
        const int down = (rows + ROWS - 1) / ROWS, right = (columns + COLUMNS - 1) / COLUMNS;
        const int tiles = down * right, tile = int(blockIdx.x % unsigned(tiles));
        const int rest = int(blockIdx.x / unsigned(tiles)), batches = int(w[AT + 3]);
        batch = rest % batches;
        const int part = rest / batches;
        // Blocks that run concurrently form squares rather than strips, so that they share reads in
        // the L2 cache.
        constexpr int BAND = 8;
        const int band = tile / (BAND * right), high = min(down - band * BAND, BAND), within = tile - band * BAND * right;
        row = (band * BAND + within % high) * ROWS;
        column = within / high * COLUMNS;
        deep = part * int(w[AT + 4]);
        end = min(deep + int(w[AT + 4]), int(w[AT + 2]));
    }
};

/// The contracted axis of a block is whole: its sums are final.
struct Whole {
    template <class Sums>
    SLABWISE_METHOD bool join(Sums&) const { return true; }
};

/// The contracted axis is split: several blocks compute a tile, and the last of them to arrive adds
/// their sums in the order of the parts, so that the bits do not depend on the order of the blocks.
/// Of more than ALONE parts, the last block of each GROUP adds those of the group, and the last of
/// these blocks the sums of the groups.
///
/// The workspace is word SUMS, with FLOATS for each block; counters are word COUNTERS: a zero for
/// each tile, then one for the first group of each tile, and so on; the number of parts is word
/// PARTS. Blocks of a part follow each other.
template <int THREADS, int FLOATS, int SUMS, int COUNTERS, int PARTS, int ALONE, int GROUP>
struct Parts {
    const u64* w;

    SLABWISE_METHOD explicit Parts(const u64* words) : w(words) {}
    /// Stores the thread's sums of this part. In the last block of the tile they become those of all
    /// parts; in the others the result is false, for all threads.
    template <class Sums>
    SLABWISE_METHOD bool join(Sums& sum) const {
        static_assert(sizeof(Sums) / sizeof(float) * THREADS == FLOATS, "the workspace holds the sums of all threads");
        // Nothing of this is computed before the product, which needs the registers.
        const int parts = int(w[PARTS]);
        const unsigned tiles = gridDim.x / unsigned(parts), part = blockIdx.x / tiles, tile = blockIdx.x % tiles;
        float* const own = reinterpret_cast<float*>(&sum);
        float* const first = reinterpret_cast<float*>(w[SUMS]) + (long long)(tile) * parts * FLOATS;
        store<Sums>(first + part * FLOATS, own);
        // First those of a group, unless it is the only one.
        const unsigned group = part / GROUP;
        bool whole = parts <= ALONE;
        int skipped = whole ? 0 : int(group) * GROUP, members = whole ? parts : min(GROUP, parts - skipped), apart = FLOATS;
        unsigned* counter = reinterpret_cast<unsigned*>(w[COUNTERS]) + tile + (whole ? 0 : (1 + group) * tiles);
#pragma unroll 1
        for (;;) {
            if (!have_arrived(counter, members)) return false;
            float* const from = first + skipped * FLOATS;
            add<Sums>(own, from, members, apart);
            if (whole) return true;
            // All blocks of the group have stored their sums, and none reads the first's any more.
            store<Sums>(from, own);
            whole = true;
            skipped = 0;
            members = (parts + GROUP - 1) / GROUP;
            apart = GROUP * FLOATS;
            counter -= (1 + group) * tiles;
        }
    }
    /// Stores the thread's sums of a part.
    template <class Sums>
    static SLABWISE_METHOD void store(float* part, const float* sum) {
        constexpr int COUNT = sizeof(Sums) / sizeof(float), V = COUNT % 4 == 0 ? 4 : 1;
        using Some = Vec<float, V>;
        float* const to = part + int(threadIdx.x) * V;
#pragma unroll
        for (int i = 0; i < COUNT; i += V) {
            Some some;
#pragma unroll
            for (int v = 0; v < V; ++v) some.v[v] = sum[i + v];
            store_vec(to + i * THREADS, some);
        }
    }
    /// The thread's sums of so many parts, from the first on.
    template <class Sums>
    static SLABWISE_METHOD void add(float* sum, const float* part, int count, int apart) {
        constexpr int COUNT = sizeof(Sums) / sizeof(float), V = COUNT % 4 == 0 ? 4 : 1;
        using Some = Vec<float, V>;
        const float* const first = part + int(threadIdx.x) * V;
        // As many sums at once as leave registers for as many loads.
        constexpr int AT_ONCE = COUNT < 64 ? COUNT : 64;
        static_assert(COUNT % AT_ONCE == 0, "every turn has as many sums");
#pragma unroll
        for (int start = 0; start < COUNT; start += AT_ONCE) {
            float total[AT_ONCE] = {};
#pragma unroll 1
            for (int from = 0; from < count; ++from) {
                const float* next = first + (long long)(from) * apart + start * THREADS;
#pragma unroll
                for (int i = 0; i < AT_ONCE; i += V) {
                    const Some some = load_written<Some>(next + i * THREADS);
#pragma unroll
                    for (int v = 0; v < V; ++v) total[i + v] += some.v[v];
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) sum[start + i] = total[i];
        }
    }
};
