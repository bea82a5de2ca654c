// Tiles of attention: rows of one operand against rows of another, in registers and on tensor
// cores. A tile in shared memory holds rows of WIDTH elements, each followed by 16 bytes of padding,
// so that eight rows lie in different banks.
//
// Both kinds of tile have the same interface. A thread has ACROSS scores in each of HIGH rows, and
// WIDE elements of the result in the same rows; LANES neighbouring threads share a row.

/// A number as an element of a type; the last argument names the type.
SLABWISE_INLINE float narrow(float x, float) { return x; }
SLABWISE_INLINE f16 narrow(float x, f16) { return narrow_f16(x); }
SLABWISE_INLINE bf16 narrow(float x, bf16) { return narrow_bf16(x); }

template <class A, class B>
struct IsSame {
    static constexpr bool VALUE = false;
};
template <class A>
struct IsSame<A, A> {
    static constexpr bool VALUE = true;
};

/// Two numbers as neighbouring halves of type E, the first one in the lower bits.
template <class E>
SLABWISE_INLINE unsigned narrow_pair(float first, float second) {
    unsigned pair;
#ifdef SLABWISE_EMULATED
    pair = narrow(first, E{}).bits | unsigned(narrow(second, E{}).bits) << 16;
#else
    if constexpr (IsSame<E, f16>::VALUE) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
    return pair;
}

/// Rows of an operand, or of the result, of elements of type E; VECTORS: they consist of aligned
/// vectors of 16 bytes.
template <class E, class Index, bool VECTORS>
struct AttentionRows {
    E* first;
    Index row, column;

    SLABWISE_METHOD E* at(int r, int c) const { return first + Index(r) * row + Index(c) * (VECTORS ? Index(1) : column); }
    /// COUNT neighbours of a row, of which those before `width` exist.
    template <int COUNT>
    SLABWISE_METHOD void store(int r, int c, int width, const float (&x)[COUNT]) const {
        if constexpr (VECTORS) {
            if (c >= width) return;
            Vec<E, COUNT> all;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) all.v[i] = narrow(x[i], E{});
            store_vec(at(r, c), all);
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (c + i < width) *at(r, c + i) = narrow(x[i], E{});
        }
    }
};

/// Starts to copy COUNT rows from `first` on to a tile; zeros behind the last of `rows`, and behind
/// `width`. Elements that are converted, and single halves, are copied at once.
template <int COUNT, class T, class E, class Index, bool VECTORS>
SLABWISE_INLINE void copy_rows(typename T::Element* tile, const AttentionRows<E, Index, VECTORS>& from, int first, int rows, int width) {
    using To = typename T::Element;
    constexpr bool STRAIGHT = IsSame<E, To>::VALUE;
    constexpr int CHUNK = 16 / sizeof(To), CHUNKS = T::WIDTH / CHUNK;
    static_assert(COUNT * CHUNKS % T::THREADS == 0, "every thread copies as much");
// (Asynchronous copies need no others beside them, loads do.)
#pragma unroll(!VECTORS ? 1 : STRAIGHT ? 2 : 4)
    for (int at = int(threadIdx.x); at < COUNT * CHUNKS; at += T::THREADS) {
        const int row = at / CHUNKS, column = at % CHUNKS * CHUNK;
        To* to = tile + row * T::LEAD + column;
        const bool inside = first + row < rows;
        if constexpr (VECTORS) {
            const bool wanted = inside && column < width;
            const E* place = wanted ? from.at(first + row, column) : from.first;
            if constexpr (STRAIGHT) {
                copy_async<16>(to, place, wanted);
            } else {
                // (A chunk may be two vectors.)
                constexpr int PART = CHUNK * sizeof(E) > 16 ? 16 / sizeof(E) : CHUNK;
                Vec<To, CHUNK> all;
#pragma unroll
                for (int part = 0; part < CHUNK; part += PART) {
                    Vec<E, PART> some{};
                    if (wanted && column + part < width) some = load_vec<Vec<E, PART>>(place + part);
#pragma unroll
                    for (int e = 0; e < PART; ++e) all.v[part + e] = narrow(widen(some.v[e]), To{});
                }
                store_vec(to, all);
            }
        } else {
#pragma unroll 1
            for (int e = 0; e < CHUNK; ++e) {
                const bool wanted = inside && column + e < width;
                const E* place = wanted ? from.at(first + row, column + e) : from.first;
                if constexpr (STRAIGHT && sizeof(E) == 4) copy_async<4>(to + e, place, wanted);
                else to[e] = wanted ? narrow(widen(*place), To{}) : To{};
            }
        }
    }
}

/// Rounds the elements that this thread has copied to tf32.
template <int COUNT, class T>
SLABWISE_INLINE void round_rows(float* tile) {
#pragma unroll 4
    for (int at = int(threadIdx.x); at < COUNT * (T::WIDTH / 4); at += T::THREADS) {
        float* own = tile + at / (T::WIDTH / 4) * T::LEAD + at % (T::WIDTH / 4) * 4;
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
    using Element = float;
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

/// A tile on tensor cores: halves, or floats rounded to tf32; a warp has DOWN × 16 rows. The scores of
/// a thread are its part of the left operand of the second product: pairs of halves as they are, and
/// floats if the rows of the right operand are taken in another order, of eight the even ones first.
template <class E, int ROWS_, int COLUMNS_, int WIDTH_, int DOWN>
struct AttentionMma {
    using Element = E;
    static constexpr bool HALVES = sizeof(E) == 2;
    /// Elements of 16 bytes.
    static constexpr int CHUNK = 16 / sizeof(E);
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, WIDTH = WIDTH_, LEAD = WIDTH + CHUNK;
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
    static SLABWISE_METHOD void round(E* tile) {
        if constexpr (!HALVES) round_rows<COUNT, AttentionMma>(tile);
    }

    static SLABWISE_METHOD void multiply(Scores& s, const E* own, const E* other) {
        const int lane = int(threadIdx.x) % 32;
        const E* x = own + (first_row() + lane % 16) * LEAD + lane / 16 * CHUNK;
        const E* y = other + (lane / 16 * 8 + lane % 8) * LEAD + lane / 8 % 2 * CHUNK;
#pragma unroll
        for (int i = 0; i < DOWN; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[i][j][e] = 0.0f;
#pragma unroll 4
        for (int k = 0; k < WIDTH; k += 2 * CHUNK) {
            unsigned down[DOWN][4];
#pragma unroll
            for (int i = 0; i < DOWN; ++i) ldmatrix_x4(down[i], x + 16 * i * LEAD + k);
#pragma unroll
            for (int j = 0; j < COLUMNS / 16; ++j) {
                unsigned across[4];
                ldmatrix_x4(across, y + 16 * j * LEAD + k);
                multiply_pairs(s, 2 * j, down, across);
            }
        }
    }

    static SLABWISE_METHOD void accumulate(Result& sum, const Scores& s, const E* other, float*) {
        const int lane = int(threadIdx.x) % 32;
        if constexpr (HALVES) {
            const E* y = other + lane % 16 * LEAD + lane / 16 * 8;
#pragma unroll
            for (int k = 0; k < COLUMNS / 16; ++k) {
                unsigned down[DOWN][4];
#pragma unroll
                for (int i = 0; i < DOWN; ++i)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const float* pair = s[i][2 * k + e / 2] + e % 2 * 2;
                        down[i][e] = narrow_pair<E>(pair[0], pair[1]);
                    }
#pragma unroll
                for (int j = 0; j < WIDTH / 16; ++j) {
                    unsigned across[4];
                    ldmatrix_x4_trans(across, y + 16 * k * LEAD + 16 * j);
                    multiply_pairs(sum, 2 * j, down, across);
                }
            }
        } else {
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
                    for (int i = 0; i < DOWN; ++i) multiply_add(sum[i][j], down[i], pair, E{});
                }
            }
        }
    }

    /// Adds the products with 16 columns to the sums from column 8 · `at` on.
    template <class Sums>
    static SLABWISE_METHOD void multiply_pairs(Sums& sums, int at, const unsigned (&down)[DOWN][4], const unsigned (&across)[4]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned pair[2] = {across[2 * half], across[2 * half + 1]};
#pragma unroll
            for (int i = 0; i < DOWN; ++i) multiply_add(sums[i][at + half], down[i], pair, E{});
        }
    }
};
