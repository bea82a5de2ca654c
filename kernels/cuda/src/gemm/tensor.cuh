// Products on tensor cores: f16 and bf16 operands, or f32 ones rounded to tf32, summed in single
// precision.

/// Fragments of one step (32 bytes of the contracted axis): 16 rows of the left operand, or 16
/// columns of the right one.
template <class E, class Layout, bool DEEP_ROWS>
struct Fragments {
    /// The place of free element `free + more` and contracted element `swizzled + deep` in rows of free
    /// elements. Only `more` modulo 64 or 32 elements determines which chunk a swizzle selects, if
    /// `free` is that of a warp's tile, and `deep` does not; the rest is a constant distance.
    static SLABWISE_METHOD const E* in_free_rows(const E* tile, int free, int more, int swizzled, int deep) {
        constexpr int SAME = sizeof(E) == 2 ? 64 : 32;
        return tile + Layout::at(free + more % SAME, swizzled) + (more / SAME * SAME + deep * Layout::DEEP_STEP);
    }
    /// Fragments of the left operand, in the layout of `mma`.
    static SLABWISE_METHOD void left(unsigned (&a)[4], const E* tile, int row, int more, int step) {
        const int lane = int(threadIdx.x) % 32;
        constexpr int CHUNK = 16 / sizeof(E);
        if constexpr (DEEP_ROWS) {
            ldmatrix_x4(a, tile + Layout::at(row + more + lane % 16, (2 * step + lane / 16) * CHUNK));
        } else if constexpr (sizeof(E) == 2) {
            ldmatrix_x4_trans(a, in_free_rows(tile, row + lane / 8 % 2 * 8, more, lane / 16 * 8 + lane % 8, 16 * step));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                a[i] = __float_as_uint(*in_free_rows(tile, row + lane / 4, more + i % 2 * 8, lane % 4, 8 * step + i / 2 * 4));
        }
        round(a);
    }
    /// Fragments of the right operand: two of them, one for each 8 columns.
    static SLABWISE_METHOD void right(unsigned (&b)[4], const E* tile, int column, int more, int step) {
        const int lane = int(threadIdx.x) % 32;
        constexpr int CHUNK = 16 / sizeof(E);
        if constexpr (DEEP_ROWS) {
            ldmatrix_x4(b, tile + Layout::at(column + more + lane / 16 * 8 + lane % 8, (2 * step + lane / 8 % 2) * CHUNK));
        } else if constexpr (sizeof(E) == 2) {
            ldmatrix_x4_trans(b, in_free_rows(tile, column + lane / 16 * 8, more, lane % 16, 16 * step));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                b[i] = __float_as_uint(*in_free_rows(tile, column + lane / 4, more + i / 2 * 8, lane % 4, 8 * step + i % 2 * 4));
        }
        round(b);
    }
    static SLABWISE_METHOD void round(unsigned (&x)[4]) {
        if constexpr (sizeof(E) == 4) {
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = round_tf32(__uint_as_float(x[i]));
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
    static constexpr int SLICE = 16 * WARPS_HIGH, LEAD = COLUMNS + 8;

    /// 16 rows and 8 columns each.
    float sum[HIGH / 16][WIDE / 8][4];

    template <bool LEFT_BY_DEEP, int LEFT_V, bool RIGHT_BY_DEEP, int RIGHT_V, class Left, class Right, class Share>
    SLABWISE_METHOD void product(const Left& a, const Right& b, const Share& share, float* shared) {
        using LeftTile = typename TensorLayout<LEFT_BY_DEEP, E, ROWS, DEEP>::Type;
        using RightTile = typename TensorLayout<RIGHT_BY_DEEP, E, COLUMNS, DEEP>::Type;
        using LeftLoader = LoaderOf<Left, LeftTile, ROWS, DEEP, THREADS, LEFT_BY_DEEP, LEFT_V>;
        using RightLoader = LoaderOf<Right, RightTile, COLUMNS, DEEP, THREADS, RIGHT_BY_DEEP, RIGHT_V>;
        E* tiles = reinterpret_cast<E*>(shared);
        E* tables = tiles + STAGES * (LeftTile::SIZE + RightTile::SIZE);
        LeftLoader left(a, share.row, share.rows, share.deep, share.end, tables);
        RightLoader right(b, share.column, share.columns, share.deep, share.end, tables + LeftLoader::SHARED_BYTES / sizeof(E));
        if constexpr (LeftLoader::SHARED_BYTES + RightLoader::SHARED_BYTES > 0) __syncthreads();
        const int row = first_row(), column = first_column();
#pragma unroll
        for (int i = 0; i < HIGH / 16; ++i)
#pragma unroll
            for (int j = 0; j < WIDE / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[i][j][e] = 0.0f;
        walk<STAGES, DEEP>(left, right, tiles, tiles + STAGES * LeftTile::SIZE, LeftTile::SIZE, RightTile::SIZE, share.deep, share.end,
                           [&](const E* x, const E* y) {
            constexpr int STEPS = DEEP_BYTES / 32;
            // The fragments of the next step are read while those of this step are multiplied.
            unsigned down[2][HIGH / 16][4], across[2][WIDE / 16][4];
            read<LeftTile, RightTile, LEFT_BY_DEEP, RIGHT_BY_DEEP>(down[0], across[0], x, y, row, column, 0);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const int now = step % 2;
                if (step + 1 < STEPS)
                    read<LeftTile, RightTile, LEFT_BY_DEEP, RIGHT_BY_DEEP>(down[1 - now], across[1 - now], x, y, row, column, step + 1);
#pragma unroll
                for (int i = 0; i < HIGH / 16; ++i)
#pragma unroll
                    for (int j = 0; j < WIDE / 8; ++j) {
                        const unsigned pair[2] = {across[now][j / 2][j % 2 * 2], across[now][j / 2][j % 2 * 2 + 1]};
                        multiply_add(sum[i][j], down[now][i], pair, E{});
                    }
            }
        });
    }
    template <class LeftTile, class RightTile, bool LEFT_DEEP, bool RIGHT_DEEP>
    static SLABWISE_METHOD void read(unsigned (&down)[HIGH / 16][4], unsigned (&across)[WIDE / 16][4], const E* x, const E* y, int row,
                                     int column, int step) {
#pragma unroll
        for (int i = 0; i < HIGH / 16; ++i) Fragments<E, LeftTile, LEFT_DEEP>::left(down[i], x, row, 16 * i, step);
#pragma unroll
        for (int j = 0; j < WIDE / 16; ++j) Fragments<E, RightTile, RIGHT_DEEP>::right(across[j], y, column, 16 * j, step);
    }
    static SLABWISE_METHOD int first_row() { return int(threadIdx.x) / 32 / WARPS_WIDE * HIGH; }
    static SLABWISE_METHOD int first_column() { return int(threadIdx.x) / 32 % WARPS_WIDE * WIDE; }

    /// As `RegisterTile::give`, 16 rows of every warp at a time.
    template <class Share, class Load, class Take>
    SLABWISE_METHOD void give(const Share& share, float* shared, Load load, Take take) {
        const int thread = int(threadIdx.x), lane = thread % 32, slot = first_row() / HIGH * 16 + lane / 4;
#pragma unroll 1
        for (int i = 0; i < HIGH / 16; ++i) {
#pragma unroll
            for (int j = 0; j < WIDE / 8; ++j) {
                float* to = shared + slot * LEAD + first_column() + 8 * j + lane % 4 * 2;
                store_vec(to, Vec<float, 2>{{sum[0][j][0], sum[0][j][1]}});
                store_vec(to + 8 * LEAD, Vec<float, 2>{{sum[0][j][2], sum[0][j][3]}});
            }
            __syncthreads();
            give_slice<SLICE * COLUMNS, THREADS>([&](int at) {
                const int from = at / COLUMNS, column = at % COLUMNS, row = from / 16 * HIGH + i * 16 + from % 16;
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
