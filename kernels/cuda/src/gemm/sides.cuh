// Matrices with arbitrary strides: the mapping from an index along a side to an element.

/// n / d for 0 <= n < 2^31; the low half of the word is the multiplier, the high half the shift.
SLABWISE_INLINE int quotient(int n, u64 divisor) { return int(__umulhi(unsigned(n) * 2u, unsigned(divisor)) >> unsigned(divisor >> 32)); }

/// The offset from the first element; for a windowed matrix also the position in the image, or the
/// part of it that this side determines.
template <class Offset>
struct Place {
    Offset offset;
    int y, x;
};

/// The axis of a window's rows on a side without a window.
static constexpr int NO_WINDOW = -1;

/// One side, spread over AXES axes of the operand, the outermost first. Words from AT on: the
/// stride of every axis; size and divisor of every axis but the outermost; for a window, whose rows
/// are along axis ROW and columns along the next, the start of y, its step along axis ROW, the start
/// of x, its step along the next axis.
template <class Offset, int AT, int AXES, int ROW>
struct Side {
    static SLABWISE_METHOD Place<Offset> at(const u64* w, int index) {
        int along[AXES];
#pragma unroll
        for (int axis = AXES - 1; axis > 0; --axis) {
            along[axis] = index;
            index = quotient(index, w[AT + AXES + 2 * (axis - 1) + 1]);
            along[axis] -= index * int(w[AT + AXES + 2 * (axis - 1)]);
        }
        along[0] = index;
        return place(w, along);
    }
    static SLABWISE_METHOD Place<Offset> place(const u64* w, const int (&along)[AXES]) {
        Place<Offset> place = {0, 0, 0};
#pragma unroll
        for (int axis = 0; axis < AXES; ++axis) place.offset += Offset(along[axis]) * Offset(w[AT + axis]);
        if constexpr (ROW != NO_WINDOW) {
            place.y = int(w[AT + 3 * AXES - 2]) + along[ROW] * int(w[AT + 3 * AXES - 1]);
            place.x = int(w[AT + 3 * AXES]) + along[ROW + 1] * int(w[AT + 3 * AXES + 1]);
        }
        return place;
    }
    /// The stride of the outermost axis.
    static SLABWISE_METHOD Offset stride(const u64* w) { return Offset(w[AT]); }
    /// Rows or columns of the image from index 0 of the window's axes to another.
    static SLABWISE_METHOD int rows(const u64* w, int index) { return index * int(w[AT + 3 * AXES - 1]); }
    static SLABWISE_METHOD int columns(const u64* w, int index) { return index * int(w[AT + 3 * AXES + 1]); }
};

/// An operand of a product. FREE is the side shared with the result, DEEP the contracted one, BATCH
/// distinguishes the products. The address is word ADDRESS. Words from AT on: the offset of the
/// first element; whether neighbours along the contiguous side form aligned vectors (WHOLE: they do
/// for all sizes; PARTIAL: but for the last of a row, which is shorter than the others); for a
/// window the image's height and width; positions along the side across threads start at 0. Tiles
/// of single elements are located by a table (`LocatedLoader`) for a window of HIGH_ × WIDE_
/// elements, the last of which are DOWN_ rows and OVER_ columns of the image from the first;
/// without a table, all are 0. STRIDE_ is the distance of neighbours along the free side, or 0
/// where the words alone know it.
template <class E, class Offset_, int ADDRESS, int AT, class BATCH, class FREE, class DEEP, bool WINDOW, bool WHOLE, bool PARTIAL_, int HIGH_,
          int WIDE_, int DOWN_, int OVER_, int STRIDE_>
struct Matrix {
    using Offset = Offset_;
    static constexpr bool IS_WINDOW = WINDOW;
    static constexpr int HIGH = HIGH_, WIDE = WIDE_, DOWN = DOWN_, OVER = OVER_, STRIDE = STRIDE_;
    static constexpr bool PARTIAL = PARTIAL_;
    using Element = E;
    using Free = FREE;
    using Deep = DEEP;
    using Spot = Place<Offset>;

    const u64* w;
    const E* first;

    SLABWISE_METHOD Matrix(const u64* words, int batch) : w(words) {
        first = reinterpret_cast<const E*>(w[ADDRESS]) + (long long)(w[AT]) + BATCH::at(w, batch).offset;
    }
    /// Whether vectors are aligned and never cross the end of an axis, but for the last of a row if
    /// PARTIAL.
    SLABWISE_METHOD bool whole() const { return WHOLE || w[AT + 1] != 0; }
    /// Whether the element lies in the image.
    SLABWISE_METHOD bool inside(const Spot& free, const Spot& deep) const {
        return !WINDOW || (unsigned(free.y + deep.y) < height() && unsigned(free.x + deep.x) < width());
    }
    SLABWISE_METHOD unsigned height() const { return unsigned(w[AT + 2]); }
    SLABWISE_METHOD unsigned width() const { return unsigned(w[AT + 3]); }
    SLABWISE_METHOD const E* address(const Spot& free, const Spot& deep) const { return first + (free.offset + deep.offset); }
};

SLABWISE_INLINE float widen(float x) { return x; }

template <class A, class B>
struct Same {
    static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
    static constexpr bool value = true;
};

template <bool FIRST, class A, class B>
struct Either {
    using Type = A;
};
template <class A, class B>
struct Either<false, A, B> {
    using Type = B;
};

/// The sum of the partial sums of element `i` of `total`, in the order of the parts.
SLABWISE_INLINE float sum_of_parts(const float* partial, int i, int total, int parts) {
    float sum = 0.0f;
#pragma unroll 4
    for (int part = 0; part < parts; ++part) sum += partial[(long long)(part) * total + i];
    return sum;
}
