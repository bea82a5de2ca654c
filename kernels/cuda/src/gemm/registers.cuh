// Products in single precision: every thread keeps a small tile of the result in registers.

/// An element of a tile of the result.
struct Given {
    int row, column;
    float sum;
};

/// Passes COUNT elements of a tile to `take`; `element` computes each from its number. The `load`
/// results of several of a thread's elements are in flight at once: the compiler could not batch
/// them itself, because it cannot know that the stores of one element are not read by another. Those
/// of one element are enough where they are many, and more would not fit in registers.
template <int COUNT, int THREADS, class Element, class Share, class Load, class Take>
SLABWISE_INLINE void give_slice(Element element, const Share& share, Load load, Take take) {
    using Loaded = decltype(load(0, 0));
    constexpr int AHEAD = int(Loaded::COUNT) > 16 ? 1 : 4;
    static_assert(COUNT % (AHEAD * THREADS) == 0, "every thread has as many elements");
#pragma unroll 1
    for (int at = int(threadIdx.x); at < COUNT; at += AHEAD * THREADS) {
        Loaded loaded[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const Given given = element(at + i * THREADS);
            if (given.row < share.rows && given.column < share.columns) loaded[i] = load(given.row, given.column);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const Given given = element(at + i * THREADS);
            if (given.row < share.rows && given.column < share.columns) take(given.row, given.column, given.sum, loaded[i]);
        }
    }
}

/// ROWS × COLUMNS of the result per block, HIGH × WIDE per thread, DEEP steps at a time, STAGES
/// tiles in shared memory. A warp is 8 threads high and 4 wide, or the reverse where the tile is not
/// so high; a thread's rows come in groups of 4 with the groups of its neighbours between them,
/// columns likewise, so that a warp reads consecutive elements.
template <int ROWS_, int COLUMNS_, int DEEP_, int HIGH, int WIDE, int STAGES>
struct RegisterTile {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, DEEP = DEEP_;
    static constexpr int TALL = ROWS / HIGH < 8 ? 4 : 8, BROAD = 32 / TALL;
    static constexpr int THREADS = ROWS / HIGH * (COLUMNS / WIDE), WARPS_WIDE = COLUMNS / (BROAD * WIDE);
    static_assert(ROWS % (TALL * HIGH) == 0 && COLUMNS % (BROAD * WIDE) == 0, "the tile is a number of warps high and wide");
    /// Rows of the result that are written at a time, and elements from one to the next in shared
    /// memory.
    static constexpr int SLICE = ROWS / HIGH, LEAD = COLUMNS % 32 == 0 ? COLUMNS + 16 : COLUMNS;

    float sum[HIGH][WIDE];

    template <bool LEFT_BY_DEEP, int LEFT_V, bool RIGHT_BY_DEEP, int RIGHT_V, class Left, class Right, class Share>
    SLABWISE_METHOD void product(const Left& a, const Right& b, const Share& share, float* shared) {
        using LeftTile = Steps<ROWS, DEEP>;
        using RightTile = Steps<COLUMNS, DEEP>;
        float* const rights = shared + LeftTile::SIZE;
        Loader<Left, LeftTile, ROWS, DEEP, THREADS, LEFT_BY_DEEP, LEFT_V> left(a, shared, share.row, share.rows);
        Loader<Right, RightTile, COLUMNS, DEEP, THREADS, RIGHT_BY_DEEP, RIGHT_V> right(b, rights, share.column, share.columns);
        const int row = first_row(int(threadIdx.x)), column = first_column(int(threadIdx.x));
#pragma unroll
        for (int i = 0; i < HIGH; ++i)
#pragma unroll
            for (int j = 0; j < WIDE; ++j) sum[i][j] = 0.0f;
        constexpr int BYTES = (LeftTile::SIZE + RightTile::SIZE) * int(sizeof(float));
        walk<STAGES, BYTES, DEEP>(left, right, share.deep, share.end, [&](int stage) {
            const float* const x = shared + stage / int(sizeof(float));
            const float* const y = x + LeftTile::SIZE;
            // Four steps at a time: with more, more fragments are read ahead than there are
            // registers. Two for a large tile whose elements are loaded one by one along the
            // contracted axis, because their addresses occupy registers too.
            constexpr int AT_ONCE = LEFT_BY_DEEP && LEFT_V == 1 && THREADS == 256 ? 2 : 4;
#pragma unroll AT_ONCE
            for (int k = 0; k < DEEP; ++k) {
                Vec<float, 4> down[HIGH / 4], across[WIDE / 4];
#pragma unroll
                for (int i = 0; i < HIGH / 4; ++i) down[i] = load_vec<Vec<float, 4>>(x + LeftTile::at(row + i * 4 * TALL, k));
#pragma unroll
                for (int j = 0; j < WIDE / 4; ++j) across[j] = load_vec<Vec<float, 4>>(y + RightTile::at(column + j * 4 * BROAD, k));
#pragma unroll
                for (int i = 0; i < HIGH; ++i)
#pragma unroll
                    for (int j = 0; j < WIDE; ++j) sum[i][j] = fmaf(down[i / 4].v[i % 4], across[j / 4].v[j % 4], sum[i][j]);
            }
        });
    }
    static SLABWISE_METHOD int first_row(int thread) { return thread / 32 / WARPS_WIDE * TALL * HIGH + thread % 32 / BROAD * 4; }
    static SLABWISE_METHOD int first_column(int thread) { return thread / 32 % WARPS_WIDE * BROAD * WIDE + thread % BROAD * 4; }

    /// Passes every element of the tile to `take(row, column, sum, load(row, column))`,
    /// neighbouring columns to neighbouring threads: through shared memory, one row of every thread
    /// at a time. The registers are shifted instead of being indexed, so that `take` occurs in the
    /// code only a few times.
    template <bool, bool, class Share, class Load, class Take>
    SLABWISE_METHOD void give(const Share& share, float* shared, Load load, Take take) {
        const int thread = int(threadIdx.x), slot = thread / 32 / WARPS_WIDE * TALL + thread % 32 / BROAD;
#pragma unroll 1
        for (int i = 0; i < HIGH; ++i) {
#pragma unroll
            for (int j = 0; j < WIDE / 4; ++j) {
                const Vec<float, 4> four = {{sum[0][4 * j], sum[0][4 * j + 1], sum[0][4 * j + 2], sum[0][4 * j + 3]}};
                store_vec(shared + slot * LEAD + first_column(thread) + j * 4 * BROAD, four);
            }
            __syncthreads();
            give_slice<SLICE * COLUMNS, THREADS>([&](int at) {
                const int from = at / COLUMNS, column = at % COLUMNS;
                const int row = from / TALL * TALL * HIGH + i / 4 * 4 * TALL + from % TALL * 4 + i % 4;
                return Given{share.row + row, share.column + column, shared[from * LEAD + column]};
            }, share, load, take);
            __syncthreads();
#pragma unroll
            for (int up = 0; up + 1 < HIGH; ++up)
#pragma unroll
                for (int j = 0; j < WIDE; ++j) sum[up][j] = sum[up + 1][j];
        }
    }
};
