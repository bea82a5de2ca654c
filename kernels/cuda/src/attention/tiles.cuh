// Tiles of attention: rows of one operand against rows of another, in registers and on tensor
// cores. A tile in shared memory holds rows of WIDTH floats, each followed by four of padding, so
// that eight rows lie in different banks.
//
// Both kinds of tile have the same interface. A thread has ACROSS scores in each of HIGH rows, and
// WIDE elements of the result in the same rows; LANES neighbouring threads share a row.

/// Rows of an operand, or of the result.
template <class Index, bool VECTORS>
struct AttentionRows {
    float* first;
    Index row, column;

    SLABWISE_METHOD float* at(int r, int c) const { return first + Index(r) * row + Index(c) * (VECTORS ? Index(1) : column); }
    /// COUNT neighbours of a row, of which those before `width` exist.
    template <int COUNT>
    SLABWISE_METHOD void store(int r, int c, int width, const float (&x)[COUNT]) const {
        if constexpr (VECTORS) {
            if (c >= width) return;
            Vec<float, COUNT> all;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) all.v[i] = x[i];
            store_vec(at(r, c), all);
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (c + i < width) *at(r, c + i) = x[i];
        }
    }
};

/// Starts to copy COUNT rows from `first` on to a tile; zeros behind the last of `rows`, and behind
/// `width`.
template <int COUNT, int WIDTH, int THREADS, class Index, bool VECTORS>
SLABWISE_INLINE void copy_rows(float* tile, const AttentionRows<Index, VECTORS>& from, int first, int rows, int width) {
    constexpr int CHUNKS = WIDTH / 4;
    static_assert(COUNT * CHUNKS % THREADS == 0, "every thread copies as much");
#pragma unroll(VECTORS ? 4 : 1)
    for (int at = int(threadIdx.x); at < COUNT * CHUNKS; at += THREADS) {
        const int row = at / CHUNKS, column = at % CHUNKS * 4;
        float* to = tile + row * (WIDTH + 4) + column;
        const bool inside = first + row < rows;
        if constexpr (VECTORS) {
            const bool wanted = inside && column < width;
            copy_async<16>(to, wanted ? from.at(first + row, column) : from.first, wanted);
        } else {
#pragma unroll 1
            for (int e = 0; e < 4; ++e) {
                const bool wanted = inside && column + e < width;
                copy_async<4>(to + e, wanted ? from.at(first + row, column + e) : from.first, wanted);
            }
        }
    }
}

/// Rounds the elements that this thread has copied to tf32.
template <int COUNT, int WIDTH, int THREADS>
SLABWISE_INLINE void round_rows(float* tile) {
#pragma unroll 4
    for (int at = int(threadIdx.x); at < COUNT * (WIDTH / 4); at += THREADS) {
        float* own = tile + at / (WIDTH / 4) * (WIDTH + 4) + at % (WIDTH / 4) * 4;
        Vec<float, 4> four = load_vec<Vec<float, 4>>(own);
#pragma unroll
        for (int e = 0; e < 4; ++e) four.v[e] = __uint_as_float(round_tf32(four.v[e]));
        store_vec(own, four);
    }
}

/// A tile in single precision, of ROWS × COLUMNS scores; ACROSS_THREADS threads share a row. The
/// second product reads its left operand from shared memory, where a warp keeps PASSED columns of
/// its own rows at a time.
template <int ROWS_, int COLUMNS_, int WIDTH_, int ACROSS_THREADS>
struct AttentionFma {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, WIDTH = WIDTH_, LEAD = WIDTH + 4;
    static constexpr int HIGH = 8, LANES = ACROSS_THREADS, THREADS = ROWS / HIGH * LANES;
    static constexpr int ACROSS = COLUMNS / LANES, WIDE = WIDTH / LANES, GROUP = 4;
    static constexpr int OWN_ROWS = 32 / LANES * HIGH, OWN_LEAD = OWN_ROWS + 4;
    static constexpr int PASSED = COLUMNS < 32 ? COLUMNS : 32;
    /// Floats of shared memory that the second product needs.
    static constexpr int SCRATCH = THREADS / 32 * PASSED * OWN_LEAD;
    static_assert(WIDE % GROUP == 0 && PASSED % LANES == 0, "whole vectors");

    using Scores = float[HIGH][ACROSS];
    using Result = float[HIGH][WIDE];

    static SLABWISE_METHOD int row(int r) { return int(threadIdx.x) / LANES * HIGH + r; }
    static SLABWISE_METHOD int score_column(int w) { return int(threadIdx.x) % LANES + LANES * w; }
    static SLABWISE_METHOD int result_column(int w) { return (int(threadIdx.x) % LANES + LANES * (w / GROUP)) * GROUP + w % GROUP; }
    static SLABWISE_METHOD float& score(Scores& s, int r, int w) { return s[r][w]; }
    static SLABWISE_METHOD float& result(Result& s, int r, int w) { return s[r][w]; }

    template <int COUNT>
    static SLABWISE_METHOD void round(float*) {}

    /// The products of rows: own by others.
    static SLABWISE_METHOD void multiply(Scores& s, const float* own, const float* other) {
        const float* x = own + row(0) * LEAD;
        const float* y = other + score_column(0) * LEAD;
#pragma unroll
        for (int r = 0; r < HIGH; ++r)
#pragma unroll
            for (int w = 0; w < ACROSS; ++w) s[r][w] = 0.0f;
        // (Large tiles leave no registers to read ahead.)
#pragma unroll(WIDTH > 64 || ACROSS > 4 ? 1 : 2)
        for (int k = 0; k < WIDTH; k += 4) {
            Vec<float, 4> left[HIGH];
#pragma unroll
            for (int r = 0; r < HIGH; ++r) left[r] = load_vec<Vec<float, 4>>(x + r * LEAD + k);
#pragma unroll
            for (int w = 0; w < ACROSS; ++w) {
                const Vec<float, 4> right = load_vec<Vec<float, 4>>(y + w * LANES * LEAD + k);
#pragma unroll
                for (int e = 0; e < 4; ++e)
#pragma unroll
                    for (int r = 0; r < HIGH; ++r) s[r][w] = fmaf(left[r].v[e], right.v[e], s[r][w]);
            }
        }
    }

    /// Adds the sums of rows of `other`, weighted by the scores of each own row.
    static SLABWISE_METHOD void accumulate(Result& sum, const Scores& s, const float* other, float* scratch) {
        float* passed = scratch + int(threadIdx.x) / 32 * (PASSED * OWN_LEAD);
        const int own = int(threadIdx.x) % 32 / LANES * HIGH, column = int(threadIdx.x) % LANES * GROUP;
#pragma unroll
        for (int part = 0; part < COLUMNS / PASSED; ++part) {
            __syncwarp();
#pragma unroll
            for (int w = 0; w < PASSED / LANES; ++w) {
                float* to = passed + score_column(w) * OWN_LEAD + own;
#pragma unroll
                for (int r = 0; r < HIGH; r += 4) {
                    const int from = part * (PASSED / LANES) + w;
                    store_vec(to + r, Vec<float, 4>{{s[r][from], s[r + 1][from], s[r + 2][from], s[r + 3][from]}});
                }
            }
            __syncwarp();
#pragma unroll 4
            for (int k = 0; k < PASSED; ++k) {
                Vec<float, 4> left[HIGH / 4], right[WIDE / GROUP];
#pragma unroll
                for (int r = 0; r < HIGH / 4; ++r) left[r] = load_vec<Vec<float, 4>>(passed + k * OWN_LEAD + own + 4 * r);
#pragma unroll
                for (int w = 0; w < WIDE / GROUP; ++w)
                    right[w] = load_vec<Vec<float, 4>>(other + (part * PASSED + k) * LEAD + column + w * GROUP * LANES);
#pragma unroll
                for (int r = 0; r < HIGH; ++r)
#pragma unroll
                    for (int w = 0; w < WIDE; ++w) sum[r][w] = fmaf(left[r / 4].v[r % 4], right[w / GROUP].v[w % GROUP], sum[r][w]);
            }
        }
    }
};

/// A tile on tensor cores, its operands rounded to tf32; a warp has DOWN × 16 rows. The scores of a
/// thread are its part of the left operand of the second product as they are, if the rows of the
/// right operand are taken in another order: of eight, the even ones first.
template <int ROWS_, int COLUMNS_, int WIDTH_, int DOWN>
struct AttentionMma {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, WIDTH = WIDTH_, LEAD = WIDTH + 4;
    static constexpr int HIGH = 2 * DOWN, LANES = 4, THREADS = ROWS / (16 * DOWN) * 32;
    static constexpr int ACROSS = COLUMNS / 4, WIDE = WIDTH / 4, GROUP = 2, SCRATCH = 0;
    static_assert(COLUMNS % 16 == 0 && WIDTH % 16 == 0, "whole fragments");

    using Scores = float[DOWN][COLUMNS / 8][4];
    using Result = float[DOWN][WIDTH / 8][4];

    static SLABWISE_METHOD int first_row() { return int(threadIdx.x) / 32 * (16 * DOWN); }
    static SLABWISE_METHOD int row(int r) { return first_row() + 8 * r + int(threadIdx.x) % 32 / 4; }
    static SLABWISE_METHOD int score_column(int w) { return 8 * (w / 2) + int(threadIdx.x) % 4 * 2 + w % 2; }
    static SLABWISE_METHOD int result_column(int w) { return score_column(w); }
    static SLABWISE_METHOD float& score(Scores& s, int r, int w) { return s[r / 2][w / 2][r % 2 * 2 + w % 2]; }
    static SLABWISE_METHOD float& result(Result& s, int r, int w) { return s[r / 2][w / 2][r % 2 * 2 + w % 2]; }

    template <int COUNT>
    static SLABWISE_METHOD void round(float* tile) { round_rows<COUNT, WIDTH, THREADS>(tile); }

    static SLABWISE_METHOD void multiply(Scores& s, const float* own, const float* other) {
        const int lane = int(threadIdx.x) % 32;
        const float* x = own + (first_row() + lane % 16) * LEAD + lane / 16 * 4;
        const float* y = other + (lane / 16 * 8 + lane % 8) * LEAD + lane / 8 % 2 * 4;
#pragma unroll
        for (int i = 0; i < DOWN; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[i][j][e] = 0.0f;
#pragma unroll 4
        for (int k = 0; k < WIDTH; k += 8) {
            unsigned down[DOWN][4];
#pragma unroll
            for (int i = 0; i < DOWN; ++i) ldmatrix_x4(down[i], x + 16 * i * LEAD + k);
#pragma unroll
            for (int j = 0; j < COLUMNS / 16; ++j) {
                unsigned across[4];
                ldmatrix_x4(across, y + 16 * j * LEAD + k);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const unsigned pair[2] = {across[2 * half], across[2 * half + 1]};
#pragma unroll
                    for (int i = 0; i < DOWN; ++i) mma_m16n8k8_tf32(s[i][2 * j + half], down[i], pair);
                }
            }
        }
    }

    static SLABWISE_METHOD void accumulate(Result& sum, const Scores& s, const float* other, float*) {
        const int lane = int(threadIdx.x) % 32;
        const float* y = other + lane % 4 * 2 * LEAD + lane / 4;
#pragma unroll
        for (int k = 0; k < COLUMNS / 8; ++k) {
            unsigned down[DOWN][4];
#pragma unroll
            for (int i = 0; i < DOWN; ++i) {
                down[i][0] = round_tf32(s[i][k][0]);
                down[i][1] = round_tf32(s[i][k][2]);
                down[i][2] = round_tf32(s[i][k][1]);
                down[i][3] = round_tf32(s[i][k][3]);
            }
#pragma unroll
            for (int j = 0; j < WIDTH / 8; ++j) {
                const float* at = y + 8 * k * LEAD + 8 * j;
                const unsigned pair[2] = {__float_as_uint(at[0]), __float_as_uint(at[LEAD])};
#pragma unroll
                for (int i = 0; i < DOWN; ++i) mma_m16n8k8_tf32(sum[i][j], down[i], pair);
            }
        }
    }
};
