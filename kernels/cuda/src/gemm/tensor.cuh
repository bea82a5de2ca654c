// Products on tensor cores: f16 and bf16 operands, or f32 ones rounded to tf32, summed in single
// precision.

/// Reads the fragments of a warp's SPAN rows or columns from tiles, a step (32 bytes of the
/// contracted axis) at a time. For each 16 of them they are the registers of the first operand of
/// `mma`, or of two second ones. A lane reads two neighbours of a first operand in free rows at
/// once: row i of the upper half of a fragment is number 2 · i of the 16, and of the lower half
/// number 2 · i + 1.
template <class E, class Layout, int SPAN, bool DEEP_ROWS, bool IS_FIRST>
struct Fragments {
    static constexpr int BLOCKS = SPAN / 16, CHUNK = 16 / sizeof(E), BYTES = sizeof(E);
    /// Places that are not at constant distances from others, because they are swizzled otherwise:
    /// those of two steps, or of 64 or 32 free elements.
    static constexpr int KINDS = DEEP_ROWS ? 2 : sizeof(E) == 4 ? (IS_FIRST ? 2 : 4) : BLOCKS < 4 ? BLOCKS : 4;

    Shared places[KINDS];

    /// For a warp whose first row or column in the tile is `first`; the first stage's is `tile`.
    SLABWISE_METHOD Fragments(Shared tile, int first) {
        const int lane = int(threadIdx.x) % 32;
#pragma unroll
        for (int i = 0; i < KINDS; ++i) places[i] = settled(tile + BYTES * place(lane, first, i));
    }
    static SLABWISE_METHOD int place(int lane, int first, int kind) {
        const int low = lane % 8, middle = lane / 8 % 2, high = lane / 16;
        if constexpr (DEEP_ROWS) return Layout::at(first + (IS_FIRST ? middle : high) * 8 + low, (2 * kind + (IS_FIRST ? high : middle)) * CHUNK);
        else if constexpr (sizeof(E) == 2) return Layout::at(first + 16 * kind + (IS_FIRST ? middle : high) * 8, (IS_FIRST ? high : middle) * 8 + low);
        else if constexpr (IS_FIRST) return Layout::at(first + 16 * kind + lane / 4 * 2, lane % 4);
        else return Layout::at(first + 8 * kind + lane / 4, lane % 4);
    }
    /// Reads those of a step from the tile of the stage that is `stage` bytes from the first.
    SLABWISE_METHOD void read(unsigned (&x)[BLOCKS][4], int stage, int step) const {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            if constexpr (DEEP_ROWS) {
                ldmatrix_x4(x[i], places[step % 2] + stage + (16 * i * Layout::FREE_STEP + step / 2 * Layout::HALF) * BYTES);
            } else if constexpr (sizeof(E) == 2) {
                ldmatrix_x4_trans(x[i], places[i % KINDS] + stage + (i / KINDS * 64 + 16 * step * Layout::DEEP_STEP) * BYTES);
            } else {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int further = (i / 2 * 32 + (8 * step + 4 * half) * Layout::DEEP_STEP) * BYTES;
                    if constexpr (IS_FIRST) {
                        load_two(x[i][2 * half], x[i][2 * half + 1], places[i % 2] + stage + further);
                    } else {
                        x[i][half] = load_one(places[i % 2 * 2] + stage + further);
                        x[i][2 + half] = load_one(places[i % 2 * 2 + 1] + stage + further);
                    }
                }
            }
        }
        if constexpr (sizeof(E) == 4) {
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
                for (int r = 0; r < 4; ++r) x[i][r] = round_tf32(__uint_as_float(x[i][r]));
        }
    }
};

SLABWISE_INLINE void multiply_add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], f16) { mma_m16n8k16_f16(d, a, b); }
SLABWISE_INLINE void multiply_add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bf16) { mma_m16n8k16_bf16(d, a, b); }
SLABWISE_INLINE void multiply_add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], float) { mma_m16n8k8_tf32(d, a, b); }

template <bool DEEP_ROWS, class E, int FREE, int DEEP>
struct TensorLayout {
    using Type = DeepRows<E, FREE, DEEP>;
};
template <class E, int FREE, int DEEP>
struct TensorLayout<false, E, FREE, DEEP> {
    using Type = FreeRows<E, FREE, DEEP>;
};

/// ROWS × COLUMNS of the result per block, HIGH × WIDE per warp, DEEP_BYTES of the contracted axis
/// at a time, STAGES tiles in shared memory.
template <class E, int ROWS_, int COLUMNS_, int DEEP_BYTES, int HIGH, int WIDE, int STAGES>
struct TensorTile {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, DEEP = DEEP_BYTES / sizeof(E);
    static constexpr int WARPS_WIDE = COLUMNS / WIDE, WARPS_HIGH = ROWS / HIGH, THREADS = 32 * WARPS_WIDE * WARPS_HIGH;
    static constexpr int SLICE = 16 * WARPS_HIGH, STEPS = DEEP_BYTES / 32;
    /// Whether the right operand is the first one of `mma`, which a lane reads by two from free
    /// rows.
    static constexpr bool is_swapped(bool right_by_deep) { return !right_by_deep && sizeof(E) == 4; }
    /// Elements from one row of the result to the next in shared memory.
    static constexpr int lead(bool swapped) { return COLUMNS + (swapped ? 4 : 8); }

    /// 16 rows and 8 columns each; swapped, 8 rows and 16 columns, the first half of them 8 rows
    /// before the second.
    float sum[HIGH / 16][WIDE / 8][4];

    /// Whether contracted elements are contiguous in a tile: a thread that keeps halves in
    /// registers stores those of other axis than its neighbours load.
    template <class M>
    static constexpr bool has_deep_rows(bool by_deep, int vector) {
        return by_deep != (M::HIGH != 0 && vector == 1 && sizeof(E) == 2);
    }

    template <bool LEFT_BY_DEEP, int LEFT_V, bool RIGHT_BY_DEEP, int RIGHT_V, class Left, class Right, class Share>
    SLABWISE_METHOD void product(const Left& a, const Right& b, const Share& share, float* shared) {
        constexpr bool LEFT_ROWS = has_deep_rows<Left>(LEFT_BY_DEEP, LEFT_V), RIGHT_ROWS = has_deep_rows<Right>(RIGHT_BY_DEEP, RIGHT_V);
        using LeftTile = typename TensorLayout<LEFT_ROWS, E, ROWS, DEEP>::Type;
        using RightTile = typename TensorLayout<RIGHT_ROWS, E, COLUMNS, DEEP>::Type;
        using LeftLoader = LoaderOf<Left, LeftTile, ROWS, DEEP, THREADS, LEFT_BY_DEEP, LEFT_V>;
        using RightLoader = LoaderOf<Right, RightTile, COLUMNS, DEEP, THREADS, RIGHT_BY_DEEP, RIGHT_V>;
        constexpr int LEFT_BYTES = LeftTile::SIZE * int(sizeof(E)), RIGHT_BYTES = RightTile::SIZE * int(sizeof(E));
        const Shared lefts = Shared(shared), rights = lefts + LEFT_BYTES;
        char* const tables = reinterpret_cast<char*>(shared) + STAGES * (LEFT_BYTES + RIGHT_BYTES);
        LeftLoader left(a, lefts, share.row, share.rows, share.deep, share.end, tables);
        RightLoader right(b, rights, share.column, share.columns, share.deep, share.end, tables + LeftLoader::SHARED_BYTES);
        if constexpr (LeftLoader::SHARED_BYTES + RightLoader::SHARED_BYTES > 0) __syncthreads();
        constexpr bool SWAPPED = is_swapped(RIGHT_BY_DEEP);
        const Fragments<E, LeftTile, HIGH, LEFT_ROWS, !SWAPPED> rows(lefts, first_row());
        const Fragments<E, RightTile, WIDE, RIGHT_ROWS, SWAPPED> columns(rights, first_column());
#pragma unroll
        for (int i = 0; i < HIGH / 16; ++i)
#pragma unroll
            for (int j = 0; j < WIDE / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[i][j][e] = 0.0f;
        walk<STAGES, LEFT_BYTES + RIGHT_BYTES, DEEP>(left, right, share.deep, share.end, [&](int stage) {
            // The fragments of the next step are read while those of this step are multiplied.
            unsigned down[2][HIGH / 16][4], across[2][WIDE / 16][4];
            rows.read(down[0], stage, 0);
            columns.read(across[0], stage, 0);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const int now = step % 2;
                if (step + 1 < STEPS) {
                    rows.read(down[1 - now], stage, step + 1);
                    columns.read(across[1 - now], stage, step + 1);
                }
                if constexpr (SWAPPED) {
#pragma unroll
                    for (int j = 0; j < WIDE / 16; ++j)
#pragma unroll
                        for (int i = 0; i < HIGH / 8; ++i) {
                            const unsigned pair[2] = {down[now][i / 2][i % 2 * 2], down[now][i / 2][i % 2 * 2 + 1]};
                            multiply_add(sum[i / 2][i % 2 * (WIDE / 16) + j], across[now][j], pair, E{});
                        }
                } else {
#pragma unroll
                    for (int i = 0; i < HIGH / 16; ++i)
#pragma unroll
                        for (int j = 0; j < WIDE / 8; ++j) {
                            const unsigned pair[2] = {across[now][j / 2][j % 2 * 2], across[now][j / 2][j % 2 * 2 + 1]};
                            multiply_add(sum[i][j], down[now][i], pair, E{});
                        }
                }
            }
        });
    }
    static SLABWISE_METHOD int first_row() { return int(threadIdx.x) / 32 / WARPS_WIDE * HIGH; }
    static SLABWISE_METHOD int first_column() { return int(threadIdx.x) / 32 % WARPS_WIDE * WIDE; }

    /// As `RegisterTile::give`, 16 rows of every warp at a time.
    template <bool LEFT_BY_DEEP, bool RIGHT_BY_DEEP, class Share, class Load, class Take>
    SLABWISE_METHOD void give(const Share& share, float* shared, Load load, Take take) {
        constexpr bool SWAPPED = is_swapped(RIGHT_BY_DEEP), ROWS_BY_TWO = !SWAPPED && !LEFT_BY_DEEP && sizeof(E) == 4;
        constexpr int LEAD = lead(SWAPPED);
        const int thread = int(threadIdx.x), lane = thread % 32;
        float* const slots = shared + first_row() / HIGH * 16 * LEAD + first_column();
#pragma unroll 1
        for (int i = 0; i < HIGH / 16; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int j = 0; j < WIDE / 8; ++j) {
                    // Swapped, a lane has two neighbours of two rows; else of a row in each half.
                    const float* const own = sum[0][j];
                    if constexpr (SWAPPED) {
                        const int row = j / (WIDE / 16) * 8 + lane % 4 * 2 + half, column = j % (WIDE / 16) * 16 + lane / 4 * 2;
                        store_vec(slots + row * LEAD + column, Vec<float, 2>{{own[half], own[2 + half]}});
                    } else {
                        const int row = half * 8 + lane / 4, column = j * 8 + lane % 4 * 2;
                        store_vec(slots + row * LEAD + column, Vec<float, 2>{{own[2 * half], own[2 * half + 1]}});
                    }
                }
            }
            __syncthreads();
            give_slice<SLICE * COLUMNS, THREADS>([&](int at) {
                const int from = at / COLUMNS, column = at % COLUMNS, slot = from % 16;
                const int row = from / 16 * HIGH + i * 16 + (ROWS_BY_TWO ? slot % 8 * 2 + slot / 8 : slot);
                return Given{share.row + row, share.column + column, shared[from * LEAD + column]};
            }, share, load, take);
            __syncthreads();
#pragma unroll
            for (int up = 0; up + 1 < HIGH / 16; ++up)
#pragma unroll
                for (int j = 0; j < WIDE / 8; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) sum[up][j][e] = sum[up + 1][j][e];
        }
    }
};
