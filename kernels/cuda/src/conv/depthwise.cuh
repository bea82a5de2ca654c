// A convolution without a sum over channels: every thread computes one position, directly from the
// image.

/// Σ image · weight over a window of HIGH × WIDE elements; axes 1 and 2 of both operands'
/// contracted side are the window's.
template <int HIGH, int WIDE, class Image, class Weight>
SLABWISE_INLINE float window_sum(const Image& image, const Weight& weight, int position, int row) {
    const typename Image::Spot corner = Image::Free::at(image.w, position);
    const typename Weight::Spot filter = Weight::Free::at(weight.w, row);
    float sum = 0.0f;
#pragma unroll
    for (int a = 0; a < HIGH; ++a) {
#pragma unroll
        for (int b = 0; b < WIDE; ++b) {
            const typename Image::Spot step = Image::Deep::place(image.w, {0, a, b});
            const typename Weight::Spot tap = Weight::Deep::place(weight.w, {0, a, b});
            const float x = image.inside(corner, step) ? widen(*image.address(corner, step)) : 0.0f;
            sum = fmaf(x, widen(*weight.address(filter, tap)), sum);
        }
    }
    return sum;
}
