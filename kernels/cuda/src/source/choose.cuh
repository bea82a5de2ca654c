
// ---- Choosing and ordering by value -------------------------------------------------------------

/// Replaces counts by their prefix sums, starting at `first`, and appends the end of the last one.
/// Called by all THREADS threads of a block, which share `sums[THREADS]`.
template <int THREADS, class I>
SLABWISE_INLINE void scan_counts(int* counts, I len, int first, int* sums) {
    const int t = threadIdx.x;
    const I each = (len + THREADS - 1) / THREADS, from = t * each, to = min(len, I(from + each));
    int sum = 0;
    for (I i = from; i < to; ++i) sum += counts[i];
    sums[t] = sum;
    __syncthreads();
    for (int o = 1; o < THREADS; o <<= 1) {
        const int before = t >= o ? sums[t - o] : 0;
        __syncthreads();
        sums[t] += before;
        __syncthreads();
    }
    int next = first + sums[t] - sum;
    for (I i = from; i < to; ++i) {
        const int count = counts[i];
        counts[i] = next;
        next += count;
    }
    if (t == THREADS - 1) counts[len] = first + sums[t];
}

/// The output positions of the threads of a block whose flag is true, from `next` on, in the order
/// of the threads; advances `next` past them. Called by all THREADS threads, which share
/// `ends[THREADS / WAVE]`.
template <int THREADS>
SLABWISE_INLINE int place_true(bool flag, int& next, int* ends) {
    const int lane = threadIdx.x % WAVE, wave = threadIdx.x / WAVE;
    const Lanes votes = ballot(flag);
    if (lane == 0) ends[wave] = count_lanes(votes);
    __syncthreads();
    int place = next + lanes_before(votes, lane);
#pragma unroll
    for (int w = 0; w < THREADS / WAVE; ++w) {
        if (w < wave) place += ends[w];
        next += ends[w];
    }
    __syncthreads();
    return place;
}

/// An element and its position as one number: ordered by element, then by position.
template <class T>
SLABWISE_INLINE u64 sort_key(T x, int position, unsigned flip) {
    const unsigned rank = unsigned(rank_largest(x)) ^ 0x80000000u ^ flip;
    return u64(rank) << 32 | unsigned(position);
}

/// Sorts COUNT keys, a power of two, by COUNT / 2 threads, of which this one has the number `m` (a
/// bitonic network; Batcher 1968). All threads of the block call it, each with the keys of its
/// team.
template <int COUNT>
SLABWISE_INLINE void sort_bitonic(u64* keys, int m) {
    for (int run = 2; run <= COUNT; run <<= 1)
        for (int step = run >> 1; step > 0; step >>= 1) {
            __syncthreads();
            const int i = 2 * m - (m & (step - 1)), j = i + step;
            const u64 a = keys[i], b = keys[j];
            if ((a > b) == ((i & run) == 0)) {
                keys[i] = b;
                keys[j] = a;
            }
        }
    __syncthreads();
}

/// The number of keys of the first list among the first `diagonal` keys of two ascending lists
/// merged (merge path; Green, McColl, Bader 2012).
template <class I>
SLABWISE_INLINE I merge_split(const u64* a, I a_len, const u64* b, I b_len, I diagonal) {
    I low = max(I(0), I(diagonal - b_len)), high = min(diagonal, a_len);
    while (low < high) {
        const I middle = (low + high) / 2;
        if (a[middle] < b[diagonal - 1 - middle]) low = middle + 1;
        else high = middle;
    }
    return low;
}

/// Two corners of a box, and its area.
struct Box {
    float x0, y0, x1, y1, area;
};

// Products are rounded before they are added, so that overlaps have the same bits as on the CPU.
SLABWISE_INLINE Box box_of(float x0, float y0, float x1, float y1) {
    return {x0, y0, x1, y1, __fmul_rn(__fadd_rn(x1, -x0), __fadd_rn(y1, -y0))};
}

/// The intersection of two boxes divided by their union; NaN if both are empty.
SLABWISE_INLINE float box_overlap(const Box& a, const Box& b) {
    const float width = fmaxf(__fadd_rn(fminf(a.x1, b.x1), -fmaxf(a.x0, b.x0)), 0.0f);
    const float height = fmaxf(__fadd_rn(fminf(a.y1, b.y1), -fmaxf(a.y0, b.y0)), 0.0f);
    const float shared = __fmul_rn(width, height);
    return shared / __fadd_rn(__fadd_rn(a.area, b.area), -shared);
}

// ---- Scans ------------------------------------------------------------------------------------

SLABWISE_INLINE float add_wrapping(float a, float b) { return a + b; }
SLABWISE_INLINE int add_wrapping(int a, int b) { return int(unsigned(a) + unsigned(b)); }

/// A sum.
template <class T>
struct ScanSum {
    T sum;
};
/// The logarithm of a sum of exponentials: the sum, relative to the largest.
struct ScanExponentials {
    float largest, sum;
};
/// The last position of the highest rank; −1 of none.
struct ScanRank {
    int rank, position;
};

SLABWISE_INLINE ScanSum<float> scan_sum(float x, int) { return {x}; }
SLABWISE_INLINE ScanSum<int> scan_sum(int x, int) { return {x}; }
SLABWISE_INLINE ScanExponentials scan_exponential(float x, int) { return {x, 1.0f}; }
template <class T>
SLABWISE_INLINE ScanRank scan_largest(T x, int position) { return {rank_largest(x), position}; }
template <class T>
SLABWISE_INLINE ScanRank scan_smallest(T x, int position) { return {rank_smallest(x), position}; }

template <class T>
SLABWISE_INLINE ScanSum<T> scan_join(ScanSum<T> a, ScanSum<T> b) { return {add_wrapping(a.sum, b.sum)}; }
SLABWISE_INLINE ScanExponentials scan_join(ScanExponentials a, ScanExponentials b) {
    if (a.largest == b.largest) return {a.largest, a.sum + b.sum};
    if (a.largest != a.largest) return a;
    if (b.largest < a.largest) return {a.largest, a.sum + b.sum * expf(b.largest - a.largest)};
    return {b.largest, b.sum + a.sum * expf(a.largest - b.largest)};
}
SLABWISE_INLINE ScanRank scan_join(ScanRank a, ScanRank b) {
    return b.position < 0 || (a.position >= 0 && b.rank < a.rank) ? a : b;
}

template <class T>
SLABWISE_INLINE T scan_result(ScanSum<T> a) { return a.sum; }
SLABWISE_INLINE float scan_result(ScanExponentials a) { return a.largest + logf(a.sum); }
SLABWISE_INLINE int scan_result(ScanRank a) { return a.position; }

/// Replaces the state of each thread of a block by those up to it joined in their order. Called by
/// all THREADS threads.
template <int THREADS, class S>
SLABWISE_INLINE void scan_states(S* states) {
    const int t = threadIdx.x;
    __syncthreads();
    for (int o = 1; o < THREADS; o <<= 1) {
        const S joined = t >= o ? scan_join(states[t - o], states[t]) : states[t];
        __syncthreads();
        states[t] = joined;
        __syncthreads();
    }
}

/// Steps of a linear recurrence joined: the state behind them is factor · 2^exponent · (the state
/// before them) + sum. The exponent is apart, so that no product of factors overflows or vanishes.
template <class T>
struct ScanLinear;
template <>
struct ScanLinear<float> {
    float factor;
    int exponent;
    float sum;
};
template <>
struct ScanLinear<int> {
    int factor, sum;
};

SLABWISE_INLINE ScanLinear<float> scan_linear(float factor, float x) {
    int exponent = 0;
    const float fraction = frexpf(factor, &exponent);
    return {fraction, exponent, x};
}
SLABWISE_INLINE ScanLinear<int> scan_linear(int factor, int x) { return {factor, x}; }

/// The state behind joined steps. The product is rounded before the sum.
SLABWISE_INLINE float scan_behind(float state, ScanLinear<float> a) {
    return __fadd_rn(ldexpf(__fmul_rn(a.factor, state), a.exponent), a.sum);
}
SLABWISE_INLINE int scan_behind(int state, ScanLinear<int> a) {
    return int(unsigned(a.factor) * unsigned(state) + unsigned(a.sum));
}

SLABWISE_INLINE ScanLinear<float> scan_join(ScanLinear<float> a, ScanLinear<float> b) {
    int exponent = 0;
    const float fraction = frexpf(__fmul_rn(a.factor, b.factor), &exponent);
    return {fraction, a.exponent + b.exponent + exponent, scan_behind(a.sum, b)};
}
SLABWISE_INLINE ScanLinear<int> scan_join(ScanLinear<int> a, ScanLinear<int> b) {
    return {int(unsigned(a.factor) * unsigned(b.factor)), scan_behind(a.sum, b)};
}

/// Whether the steps of a block have to be taken one after the other: sums that factors above 1
/// enlarge would cancel, and a factor that is not finite makes NaN of a state of 0 that it never
/// meets. Called by all threads, each with its step.
SLABWISE_INLINE bool scan_walks(ScanLinear<float> a, bool first) {
    const float factor = fabsf(ldexpf(a.factor, a.exponent));
    if (!__syncthreads_or(!(factor <= 1.0f))) return false;
    const bool finite = factor <= 3.402823466e38f;
    return __syncthreads_or(!finite || (!first && a.sum != 0.0f));
}
SLABWISE_INLINE bool scan_walks(ScanLinear<int>, bool) { return false; }

/// Takes the steps of all THREADS threads one after the other: each becomes the state behind it.
template <int THREADS>
SLABWISE_INLINE void scan_walk(float state, ScanLinear<float>* steps) {
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 0; i < THREADS; ++i) {
            const float factor = ldexpf(steps[i].factor, steps[i].exponent);
            state = __fadd_rn(__fmul_rn(factor, state), steps[i].sum);
            steps[i] = {0.0f, 0, state};
        }
    __syncthreads();
}
template <int THREADS>
SLABWISE_INLINE void scan_walk(int, ScanLinear<int>*) {}
