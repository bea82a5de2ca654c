// Products of few rows with quantized weights, whose rows are packed numbers of BITS bits, the first in
// the lowest bits. Each block of them has a scale and a zero point: number q stands for
// (q − zero) · scale.

/// A number for each block of the rows of weights. Words from AT on: the offset of the first, and the
/// distances from row to row and from block to block. A thread reads those of one row.
template <class E, class Offset, int ADDRESS, int AT>
struct BlockNumbers {
    Offset row;

    SLABWISE_METHOD void start(const u64* w, int at) { row = Offset(w[AT]) + Offset(at) * Offset(w[AT + 1]); }
    SLABWISE_METHOD E at(const u64* w, int block) const { return reinterpret_cast<const E*>(w[ADDRESS])[row + Offset(block) * Offset(w[AT + 2])]; }
};

/// Zero points of weights that have none of their own: the middle of the range.
template <int BITS>
struct MiddleZeros {
    static constexpr bool INTEGRAL = true;
    SLABWISE_METHOD void start(const u64*, int) {}
    SLABWISE_METHOD float at(const u64*, int) const { return float(1 << (BITS - 1)); }
};

/// Zero points of any value.
template <class Numbers>
struct FloatZeros : Numbers {
    static constexpr bool INTEGRAL = false;
};

/// Zero points that are packed like the numbers; `Numbers` are their bytes.
template <int BITS, class Numbers>
struct PackedZeros {
    static constexpr bool INTEGRAL = true;
    Numbers bytes;
    SLABWISE_METHOD void start(const u64* w, int row) { bytes.start(w, row); }
    SLABWISE_METHOD float at(const u64* w, int block) const {
        const unsigned byte = bytes.at(w, block / (8 / BITS));
        return float(byte >> block % (8 / BITS) * BITS & ((1u << BITS) - 1));
    }
};

/// The 32 bits at an address.
template <bool ALIGNED>
SLABWISE_INLINE unsigned packed_word(const unsigned char* at) {
    if constexpr (ALIGNED) {
        return load_vec<Vec<unsigned, 1>>(at).v[0];
    } else {
        unsigned word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) word |= unsigned(at[i]) << 8 * i;
        return word;
    }
}

/// (word & mask) | more, in one instruction, because `more` is no immediate in it.
SLABWISE_INLINE unsigned masked(unsigned word, unsigned mask, unsigned more) {
#ifdef SLABWISE_EMULATED
    return (word & mask) | more;
#else
    unsigned bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(word), "r"(mask), "r"(more));
    return bits;
#endif
}

/// The first COUNT numbers of a word, in its lower half, less their zero point. A number stays at its
/// place: behind the exponent of 2²³ the bits are 2²³ + q · 2ʲ, which one multiply-add makes q − zero,
/// exactly for integral zero points.
template <int BITS, bool INTEGRAL, int COUNT>
SLABWISE_INLINE void decode(unsigned word, float zero, float (&values)[COUNT]) {
    constexpr unsigned MASK = (1u << BITS) - 1, EXPONENT = 0x4b000000;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float unit = 1.0f / float(1 << i * BITS), base = 8388608.0f * unit;
        const float bits = __uint_as_float(masked(word, MASK << i * BITS, EXPONENT));
        values[i] = INTEGRAL ? fmaf(bits, unit, -(base + zero)) : fmaf(bits, unit, -base) - zero;
    }
}

/// As `dot_products`: a warp per LARGE columns of the result, which are rows of the weights, whose lanes
/// take a word at a time. The rows of the result are those from `above` on, `few` of them or, if these
/// are more, FEW. ALIGNED: rows of weights begin at words. BY_DEEP: neighbours of the small operand lie
/// along the contracted axis.
template <int FEW, int LARGE, int BITS, int BLOCK, bool ALIGNED, bool BY_DEEP, class Scales, class Zeros, class Weights, class Small, class Parts, class Take>
SLABWISE_INLINE void quantized_dots(const Weights& weights, const Small& small, int first, int count, int above, int few, int deep,
                                    int end, const Parts& parts, Take take) {
    // Numbers of a word, and of them those that are decoded at once.
    constexpr int STEPS = 32 / BITS, COUNT = BITS < 8 ? 4 : 2;
    // Words of a column that are on their way at once.
    constexpr int WORDS = LARGE < 4 ? 2 : 1;
    // Other elements that are on their way at once leave no registers where they are many.
    constexpr int TURNS = FEW * STEPS >= 64 ? 1 : STEPS / COUNT;
    const int lane = int(threadIdx.x) % 32;
    typename Weights::Offset rows[LARGE];
    Scales scales[LARGE];
    Zeros zeros[LARGE];
    float sum[LARGE][FEW];
    typename Small::Spot others[FEW];
#pragma unroll
    for (int i = 0; i < LARGE; ++i) {
        // Those after the last are not taken.
        const int column = min(first + i, count - 1);
        rows[i] = Weights::Free::at(weights.w, column).offset;
        scales[i].start(weights.w, column);
        zeros[i].start(weights.w, column);
    }
#pragma unroll
    for (int s = 0; s < FEW; ++s) others[s] = Small::Free::at(small.w, above + min(s, few - 1));
#pragma unroll
    for (int i = 0; i < LARGE; ++i)
#pragma unroll
        for (int s = 0; s < FEW; ++s) sum[i][s] = 0.0f;
    const bool whole = BY_DEEP && small.whole();
#pragma unroll 1
    for (int from = deep + lane * STEPS; from < end; from += 32 * STEPS * WORDS) {
        unsigned words[WORDS][LARGE];
        float scale[WORDS][LARGE], zero[WORDS][LARGE];
#pragma unroll
        for (int u = 0; u < WORDS; ++u) {
            // Past the end, the first word is read again.
            const int ahead = from + u * 32 * STEPS, k = ahead < end ? ahead : from, block = k / BLOCK;
#pragma unroll
            for (int i = 0; i < LARGE; ++i) {
                words[u][i] = packed_word<ALIGNED>(weights.first + (rows[i] + typename Weights::Offset(k / STEPS * 4)));
                scale[u][i] = scales[i].at(weights.w, block);
                zero[u][i] = zeros[i].at(weights.w, block);
            }
        }
#pragma unroll
        for (int u = 0; u < WORDS; ++u) {
            if (u > 0 && from + u * 32 * STEPS >= end) break;
#pragma unroll TURNS
            for (int n = 0; n < STEPS; n += COUNT) {
                const int k = from + u * 32 * STEPS + n;
                float values[LARGE][COUNT];
#pragma unroll
                for (int i = 0; i < LARGE; ++i) decode<BITS, Zeros::INTEGRAL>(words[u][i] >> n * BITS, zero[u][i], values[i]);
#pragma unroll
                for (int s = 0; s < FEW; ++s) {
                    Vec<float, COUNT> other;
                    if (whole) {
                        other = load_vec<Vec<float, COUNT>>(small.address(others[s], Small::Deep::at(small.w, k)));
                    } else {
#pragma unroll
                        for (int j = 0; j < COUNT; ++j) other.v[j] = *small.address(others[s], Small::Deep::at(small.w, k + j));
                    }
#pragma unroll
                    for (int i = 0; i < LARGE; ++i) {
                        float part = values[i][0] * other.v[0];
#pragma unroll
                        for (int j = 1; j < COUNT; ++j) part = fmaf(values[i][j], other.v[j], part);
                        sum[i][s] = fmaf(part, scale[u][i], sum[i][s]);
                    }
                }
            }
        }
    }
    give_lanes(sum, first, count, few, parts, take);
}
