// Definitions that the shim declared but could not make before the prelude's types were known, and
// the runtime's entry to a kernel.

EMULATED float widen(f16 x) { return same_bits<_Float16>(x.bits); }
EMULATED f16 narrow_f16(float x) { return {same_bits<unsigned short>(_Float16(x))}; }
/// To nearest, halves to even.
EMULATED bf16 narrow_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {(unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

template <int N>
constexpr unsigned slabwise_count(void (*)(Words<N>)) {
    return N;
}
template <int N>
EMULATED void slabwise_enter(void (*kernel)(Words<N>), const void* words) {
    kernel(*static_cast<const Words<N>*>(words));
}
#define SLABWISE_ENTRY(kernel) \
    {#kernel, [](const void* words) { slabwise_enter(kernel, words); }, slabwise_count(kernel), __start_shared_##kernel, __stop_shared_##kernel}
#define SLABWISE_SECTION(kernel) \
    extern "C" char __start_shared_##kernel[] __attribute__((weak, visibility("hidden"))); \
    extern "C" char __stop_shared_##kernel[] __attribute__((weak, visibility("hidden")));
