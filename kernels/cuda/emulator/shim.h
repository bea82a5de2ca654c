// CUDA C++ as ordinary C++, for g++: placed before the prelude, with SLABWISE_EMULATED defined.
// Operations that involve several threads (barriers, shuffles, tensor cores, asynchronous copies)
// call the runtime. No standard header is included, because it would take longer to compile than
// most kernels.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __grid_constant__
// g++ needs a third less time where it chooses itself which functions become parts of others.
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
// One block runs at a time, so its shared memory is static: in a section per kernel, which the
// runtime poisons.
#define __shared__ static __attribute__((section(SLABWISE_SHARED)))
#define SHARED_BYTES(type, name) type* name = reinterpret_cast<type*>(slabwise_dynamic_shared)
// Lanes of a wave: 32, or 64 as on other vendors' devices, where masks have 64 bits.
#ifndef SLABWISE_WAVE
#define SLABWISE_WAVE 32
#endif
#define warpSize SLABWISE_WAVE

typedef __SIZE_TYPE__ size_t;
#if SLABWISE_WAVE == 64
typedef unsigned long long SlabwiseMask;
#else
typedef unsigned SlabwiseMask;
#endif
#define EMULATED static inline

// ---- The runtime --------------------------------------------------------------------------------

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};

extern "C" {
#define SLABWISE_HIDDEN __attribute__((visibility("hidden")))
extern SLABWISE_HIDDEN uint3 threadIdx, blockIdx;
extern SLABWISE_HIDDEN dim3 blockDim, gridDim;
extern SLABWISE_HIDDEN unsigned char* slabwise_dynamic_shared;
/// A collective operation of a warp: the last lane of the mask to arrive runs it on the arguments
/// of all.
typedef void (*SlabwiseTogether)(void** arguments, unsigned long long mask);
SLABWISE_HIDDEN void slabwise_together(unsigned long long mask, SlabwiseTogether what, void* argument);
enum SlabwiseBarrier { SLABWISE_PLAIN, SLABWISE_COUNT, SLABWISE_AND, SLABWISE_OR };
SLABWISE_HIDDEN int slabwise_barrier(int kind, int predicate);
SLABWISE_HIDDEN void slabwise_copy_begin(void* to, const void* from, int bytes, int present);
SLABWISE_HIDDEN void slabwise_copy_commit();
SLABWISE_HIDDEN void slabwise_copy_wait(int pending);
SLABWISE_HIDDEN void slabwise_fail(const char* what) __attribute__((noreturn));
SLABWISE_HIDDEN unsigned slabwise_lane();
struct SlabwiseEntry {
    const char* name;
    void (*call)(const void* words);
    unsigned words;
    char *shared_start, *shared_end;
};
extern SLABWISE_HIDDEN const SlabwiseEntry slabwise_entries[];
extern SLABWISE_HIDDEN const unsigned slabwise_entry_count, slabwise_wave;

double rint(double), sin(double), cos(double), floor(double), pow(double, double), log(double);
float lgammaf(float), expf(float), exp2f(float), expm1f(float), logf(float), log2f(float), log1pf(float), sqrtf(float), tanhf(float), erff(float),
    sinf(float), cosf(float), tanf(float), sinhf(float), coshf(float), log10f(float), floorf(float), ceilf(float), rintf(float), truncf(float), fabsf(float), powf(float, float), frexpf(float, int*), ldexpf(float, int),
    atan2f(float, float), fmodf(float, float),
    fmaf(float, float, float), fmaxf(float, float), fminf(float, float);
int printf(const char*, ...);
void* memcpy(void*, const void*, size_t);
void* memset(void*, int, size_t);
}

// ---- Bits and arithmetic ------------------------------------------------------------------------

template <class To, class From>
EMULATED To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps their number");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}
EMULATED float __int_as_float(int x) { return same_bits<float>(x); }
EMULATED float __uint_as_float(unsigned x) { return same_bits<float>(x); }
EMULATED int __float_as_int(float x) { return same_bits<int>(x); }
EMULATED unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
EMULATED unsigned __umulhi(unsigned x, unsigned y) { return (unsigned long long)x * y >> 32; }
EMULATED unsigned long long __umul64hi(unsigned long long x, unsigned long long y) { return (unsigned __int128)x * y >> 64; }
EMULATED int __popc(unsigned x) { return __builtin_popcount(x); }
EMULATED int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMULATED int __clz(int x) { return x ? __builtin_clz(x) : 32; }
EMULATED int __ffs(int x) { return __builtin_ffs(x); }
EMULATED float rsqrtf(float x) { return 1.0f / sqrtf(x); }
EMULATED float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
EMULATED float __fmul_rn(float x, float y) {
    volatile float product = x * y;
    return product;
}
EMULATED float __fadd_rn(float x, float y) {
    volatile float sum = x + y;
    return sum;
}
// Conversions saturate, and give 0 for NaN.
EMULATED int __float2int_rz(float x) {
    return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x <= -2147483648.0f ? -2147483647 - 1 : int(x);
}
EMULATED unsigned __float2uint_rz(float x) { return !(x > 0.0f) ? 0u : x >= 4294967296.0f ? 4294967295u : unsigned(x); }
#define SLABWISE_ORDER(T) \
    EMULATED T min(T x, T y) { return x < y ? x : y; } \
    EMULATED T max(T x, T y) { return x > y ? x : y; }
SLABWISE_ORDER(int)
SLABWISE_ORDER(unsigned)
SLABWISE_ORDER(long long)
SLABWISE_ORDER(unsigned long long)

struct f16;
struct bf16;
EMULATED float widen(f16 x);
EMULATED f16 narrow_f16(float x);
EMULATED bf16 narrow_bf16(float x);

// ---- Memory -------------------------------------------------------------------------------------

EMULATED void check_aligned(const void* p, size_t bytes) {
    if (size_t(p) % bytes) slabwise_fail("misaligned vector access");
}
template <class V>
EMULATED V load_vec(const void* p) {
    check_aligned(p, alignof(V));
    return *reinterpret_cast<const V*>(p);
}
template <class V>
EMULATED void store_vec(void* p, const V& v) {
    check_aligned(p, alignof(V));
    *reinterpret_cast<V*>(p) = v;
}
template <class V>
EMULATED V load_written(const void* p) {
    return load_vec<V>(p);
}
template <class T>
EMULATED T __ldg(const T* p) {
    return *p;
}
#define SLABWISE_ATOMIC(name, expression) \
    template <class T> \
    EMULATED T name(T* p, T x) { \
        const T old = *p; \
        *p = expression; \
        return old; \
    }
SLABWISE_ATOMIC(atomicAdd, old + x)
SLABWISE_ATOMIC(atomicMin, old < x ? old : x)
SLABWISE_ATOMIC(atomicMax, old > x ? old : x)
SLABWISE_ATOMIC(atomicExch, x)
SLABWISE_ATOMIC(atomicInc, old >= x ? 0 : old + 1)
EMULATED void __threadfence() {}

// ---- Blocks and warps ---------------------------------------------------------------------------

EMULATED void __syncthreads() { slabwise_barrier(SLABWISE_PLAIN, 0); }
EMULATED int __syncthreads_count(int x) { return slabwise_barrier(SLABWISE_COUNT, x); }
EMULATED int __syncthreads_and(int x) { return slabwise_barrier(SLABWISE_AND, x); }
EMULATED int __syncthreads_or(int x) { return slabwise_barrier(SLABWISE_OR, x); }

EMULATED void nothing_together(void**, unsigned long long) {}
EMULATED void __syncwarp(SlabwiseMask mask = ~SlabwiseMask(0)) { slabwise_together(mask, nothing_together, nullptr); }

struct Shuffle {
    unsigned long long value, result;
    int source;
};
EMULATED void shuffle_together(void** arguments, unsigned long long mask) {
    for (int lane = 0; lane < SLABWISE_WAVE; ++lane) {
        if (!(mask >> lane & 1)) continue;
        Shuffle* own = static_cast<Shuffle*>(arguments[lane]);
        if (!(mask >> own->source & 1)) slabwise_fail("a shuffle reads a lane outside of its mask");
        own->result = static_cast<Shuffle*>(arguments[own->source])->value;
    }
}
template <class T>
EMULATED T shuffle_from(SlabwiseMask mask, T value, int source) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    Shuffle s = {0, 0, source};
    memcpy(&s.value, &value, sizeof(T));
    slabwise_together(mask, shuffle_together, &s);
    memcpy(&value, &s.result, sizeof(T));
    return value;
}
template <class T>
EMULATED T __shfl_sync(SlabwiseMask mask, T value, int source, int width = SLABWISE_WAVE) {
    return shuffle_from(mask, value, int(slabwise_lane() & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
EMULATED T __shfl_xor_sync(SlabwiseMask mask, T value, int bits, int width = SLABWISE_WAVE) {
    const int lane = slabwise_lane(), source = lane ^ bits;
    return shuffle_from(mask, value, (source & ~(width - 1)) > (lane & ~(width - 1)) ? lane : source);
}
template <class T>
EMULATED T __shfl_down_sync(SlabwiseMask mask, T value, unsigned by, int width = SLABWISE_WAVE) {
    const int lane = slabwise_lane();
    return shuffle_from(mask, value, (lane & (width - 1)) + int(by) >= width ? lane : lane + int(by));
}
template <class T>
EMULATED T __shfl_up_sync(SlabwiseMask mask, T value, unsigned by, int width = SLABWISE_WAVE) {
    const int lane = slabwise_lane();
    return shuffle_from(mask, value, (lane & (width - 1)) < int(by) ? lane : lane - int(by));
}

struct Vote {
    bool yes;
    SlabwiseMask result;
};
EMULATED void vote_together(void** arguments, unsigned long long mask) {
    SlabwiseMask result = 0;
    for (int lane = 0; lane < SLABWISE_WAVE; ++lane)
        if ((mask >> lane & 1) && static_cast<Vote*>(arguments[lane])->yes) result |= SlabwiseMask(1) << lane;
    for (int lane = 0; lane < SLABWISE_WAVE; ++lane)
        if (mask >> lane & 1) static_cast<Vote*>(arguments[lane])->result = result;
}
EMULATED SlabwiseMask __ballot_sync(SlabwiseMask mask, int yes) {
    Vote v = {yes != 0, 0};
    slabwise_together(mask, vote_together, &v);
    return v.result;
}
EMULATED int __any_sync(SlabwiseMask mask, int yes) { return __ballot_sync(mask, yes) != 0; }
EMULATED int __all_sync(SlabwiseMask mask, int yes) { return __ballot_sync(mask, !yes) == 0; }
EMULATED SlabwiseMask __activemask() { return ~SlabwiseMask(0); }

// ---- Tensor cores and asynchronous copies -------------------------------------------------------

EMULATED unsigned low_bits(int count) { return unsigned(count) > 31 ? ~0u : (1u << count) - 1u; }
EMULATED unsigned pair_of(unsigned first, unsigned second) { return (first & 0xffffu) | second << 16; }

/// A place in shared memory.
struct Shared {
    unsigned char* address;

    Shared() = default;
    Shared(const void* p) : address(static_cast<unsigned char*>(const_cast<void*>(p))) {}
    Shared operator+(int bytes) const { return address + bytes; }
};
EMULATED Shared settled(Shared place) { return place; }
EMULATED int settled(int x) { return x; }
EMULATED long long settled(long long x) { return x; }
template <class S>
EMULATED void store_element(Shared to, S x) { store_vec(to.address, x); }
EMULATED unsigned load_one(Shared from) { return load_vec<unsigned>(from.address); }
EMULATED void load_two(unsigned& first, unsigned& second, Shared from) {
    check_aligned(from.address, 8);
    memcpy(&first, from.address, 4);
    memcpy(&second, from.address + 4, 4);
}
EMULATED void load_four(unsigned (&v)[4], Shared from) {
    check_aligned(from.address, 16);
    memcpy(v, from.address, 16);
}
EMULATED void store_four(Shared to, const unsigned (&v)[4]) {
    check_aligned(to.address, 16);
    memcpy(to.address, v, 16);
}

struct MatrixLoad {
    unsigned* registers;
    const unsigned char* row;
};
template <int COUNT, bool TRANSPOSED>
EMULATED void matrices_together(void** arguments, unsigned long long mask) {
    if (mask != 0xffffffffu) slabwise_fail("ldmatrix without a whole warp");
    for (int matrix = 0; matrix < COUNT; ++matrix) {
        // Row r of a matrix is at the address of lane 8 · matrix + r.
        const auto element = [&](int row, int column) {
            unsigned short bits;
            memcpy(&bits, static_cast<MatrixLoad*>(arguments[8 * matrix + row])->row + 2 * column, 2);
            return unsigned(bits);
        };
        for (int lane = 0; lane < 32; ++lane) {
            const int row = lane / 4, column = 2 * (lane % 4);
            const unsigned first = TRANSPOSED ? element(column, row) : element(row, column);
            const unsigned second = TRANSPOSED ? element(column + 1, row) : element(row, column + 1);
            static_cast<MatrixLoad*>(arguments[lane])->registers[matrix] = first | second << 16;
        }
    }
}
template <int COUNT, bool TRANSPOSED>
EMULATED void load_matrices(unsigned* registers, const void* row) {
    if (size_t(row) % 16) slabwise_fail("ldmatrix of a row that is not aligned to 16 bytes");
    MatrixLoad load = {registers, static_cast<const unsigned char*>(row)};
    slabwise_together(0xffffffffu, matrices_together<COUNT, TRANSPOSED>, &load);
}
EMULATED void ldmatrix_x4(unsigned (&r)[4], Shared row) { load_matrices<4, false>(r, row.address); }
EMULATED void ldmatrix_x4_trans(unsigned (&r)[4], Shared row) { load_matrices<4, true>(r, row.address); }
EMULATED void ldmatrix_x2(unsigned (&r)[2], Shared row) { load_matrices<2, false>(r, row.address); }
EMULATED void ldmatrix_x2_trans(unsigned (&r)[2], Shared row) { load_matrices<2, true>(r, row.address); }

struct Product {
    float* d;
    const unsigned *a, *b;
};
EMULATED float half_of(unsigned pair, int which) { return same_bits<_Float16>((unsigned short)(pair >> 16 * which)); }
EMULATED float bf16_of(unsigned pair, int which) { return __uint_as_float(pair >> 16 * which << 16); }
EMULATED float tf32_of(unsigned bits, int) { return __uint_as_float(bits & ~0x1fffu); }
/// A product of 16×K by K×8. A register holds EACH elements; groups of four lanes hold a row of a
/// and d, a column of b.
template <int K, int EACH, float (*ELEMENT)(unsigned, int)>
EMULATED void product_together(void** arguments, unsigned long long mask) {
    if (mask != 0xffffffffu) slabwise_fail("mma without a whole warp");
    float a[16][K], b[K][8], d[16][8] = {};
    for (int lane = 0; lane < 32; ++lane) {
        const Product* p = static_cast<Product*>(arguments[lane]);
        const int group = lane / 4, first = lane % 4 * EACH;
        for (int e = 0; e < EACH; ++e) {
            for (int r = 0; r < 4; ++r) a[group + 8 * (r % 2)][first + e + K / 2 * (r / 2)] = ELEMENT(p->a[r], e);
            for (int r = 0; r < 2; ++r) b[first + e + K / 2 * r][group] = ELEMENT(p->b[r], e);
        }
    }
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < K; ++k)
            for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
    for (int lane = 0; lane < 32; ++lane) {
        float* own = static_cast<Product*>(arguments[lane])->d;
        for (int e = 0; e < 4; ++e) own[e] += d[lane / 4 + 8 * (e / 2)][lane % 4 * 2 + e % 2];
    }
}
template <int K, int EACH, float (*ELEMENT)(unsigned, int)>
EMULATED void multiply(float* d, const unsigned* a, const unsigned* b) {
    Product p = {d, a, b};
    slabwise_together(0xffffffffu, product_together<K, EACH, ELEMENT>, &p);
}
EMULATED void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { multiply<16, 2, half_of>(d, a, b); }
EMULATED void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { multiply<16, 2, bf16_of>(d, a, b); }
EMULATED void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { multiply<8, 1, tf32_of>(d, a, b); }
template <class T>
EMULATED const T* settled(const T* p) { return p; }
/// Halves away from zero, as `cvt.rna` rounds; `cvt.rn` rounds them to even.
EMULATED unsigned round_tf32(float x) {
    const unsigned bits = __float_as_uint(x);
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & ~0x1fffu;
}

template <int BYTES>
EMULATED void copy_async(Shared place, const void* from, bool wanted) {
    void* const to = place.address;
    if (size_t(to) % BYTES || (wanted && size_t(from) % BYTES)) slabwise_fail("misaligned asynchronous copy");
    slabwise_copy_begin(to, from, BYTES, wanted ? BYTES : 0);
}
EMULATED void copy_async_part(Shared place, const void* from, int present) {
    void* const to = place.address;
    if (size_t(to) % 16 || (present && size_t(from) % 16)) slabwise_fail("misaligned asynchronous copy");
    if (present < 0 || present > 16) slabwise_fail("an asynchronous copy of more bytes than it has");
    slabwise_copy_begin(to, from, 16, present);
}
EMULATED void copy_async_commit() { slabwise_copy_commit(); }
template <int PENDING>
EMULATED void copy_async_wait() {
    slabwise_copy_wait(PENDING);
}
