// Declarations shared by generated kernels: the prefix of every program that NVRTC compiles, and of
// every program that the emulator runs. No standard headers are included, because NVRTC has none.

#define SLABWISE_INLINE static __device__ __forceinline__
#define SLABWISE_METHOD __device__ __forceinline__

typedef unsigned long long u64;

/// The one parameter of a kernel.
template <int N>
struct Words {
    u64 w[N];
};

/// N neighbours that are moved at once.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
    T v[N];
};

/// Waits for the kernels that this one depends on, before it reads memory, if it was launched
/// before they ended. Otherwise it does nothing.
SLABWISE_INLINE void wait_for_earlier_kernels() {
#if !defined(SLABWISE_EMULATED) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Whether so many blocks have arrived at a counter, which returns to zero with the last of them, the
/// only one that gets true. The barriers order the accesses of the block's other threads with those of
/// the first, whose fences order them with those of other blocks.
SLABWISE_INLINE bool have_arrived(unsigned* counter, int blocks) {
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(counter, unsigned(blocks - 1)) == unsigned(blocks - 1);
        // The others read nothing.
        if (last) __threadfence();
    }
    return __syncthreads_or(last) != 0;
}

SLABWISE_INLINE float infinity() { return __int_as_float(0x7f800000); }

/// A power of integers, which wraps; for y < 0 the integer part of the fraction, and 0 for 0ʸ.
SLABWISE_INLINE int integer_pow(int x, int y) {
    if (x == 1) return 1;
    if (x == -1) return y & 1 ? -1 : 1;
    if (y < 0) return 0;
    unsigned base = unsigned(x), power = 1;
    for (unsigned rest = unsigned(y); rest != 0; rest >>= 1, base *= base)
        if (rest & 1) power *= base;
    return int(power);
}

/// The derivative of x·Φ(x) with the normal distribution function Φ. From 15 on its density is 0.
SLABWISE_INLINE float gelu_slope(float x) {
    const float bounded = x < -15.0f ? -15.0f : x > 15.0f ? 15.0f : x;
    const float density = expf(bounded * bounded * -0.5f) * 0.39894228f;
    return 0.5f * (erff(x * 0.70710678f) + 1.0f) + bounded * density;
}

/// The derivative of x·σ(√(8/π)·(x + 0.044715·x³)), which is 1 from 11 on, and 0 from −11 on.
SLABWISE_INLINE float gelu_tanh_slope(float x) {
    x = x < -11.0f ? -11.0f : x > 11.0f ? 11.0f : x;
    const float square = x * x, scale = 1.5957691f;
    const float z = scale * (x * (square * 0.044715f + 1.0f));
    const float slope = (square * (3.0f * 0.044715f) + 1.0f) * scale;
    // σ(|z|) and 1 − σ(|z|), without cancellation.
    const float power = expf(-fabsf(z)), high = 1.0f / (1.0f + power), low = power * high;
    return (z < 0.0f ? low : high) + x * high * low * slope;
}

/// (sin πr, cos πr) for |r| ≤ 1/2, of the distance r of x from the nearest integer.
SLABWISE_INLINE void half_turn(double x, double& sine, double& cosine) {
    const double pi = 3.14159265358979323846, r = (x - rint(x)) * pi;
    sine = sin(r);
    cosine = cos(r);
}

/// Hurwitz's zeta function, the sum of (x + i)^-s, by Euler and Maclaurin's formula.
SLABWISE_INLINE double zeta(int s, double x) {
    const double even[8] = {1.0 / 12, -1.0 / 120, 1.0 / 252, -1.0 / 240, 1.0 / 132, -691.0 / 32760, 1.0 / 12, -3617.0 / 8160};
    double y = x < -512 ? x + floor(-512 - x) : x, sum = 0;
    for (; y < 10 + s; y += 1) sum += pow(y, -double(s));
    const double term = pow(y, -double(s));
    sum += term * (y / (s - 1) + 0.5);
    double factor = s * term / y;
    for (int k = 0; k < 8; k++) {
        const double m = 2.0 * (k + 1);
        sum += even[k] * factor;
        factor *= (s + m - 1) * (s + m) / (y * y * m * (m + 1));
    }
    return sum;
}

/// The derivative of order n + 1 of ln Γ at x, for a whole number n in 0..=100.
SLABWISE_INLINE float polygamma(float order, float x) {
    const float rounded = rintf(order);
    if (!(rounded >= 0 && rounded <= 100) || x != x) return __int_as_float(0x7fc00000);
    const int n = int(rounded);
    const bool pole = x <= 0 && x == floorf(x);
    const double pi = 3.14159265358979323846;
    double sine, cosine;
    half_turn(x, sine, cosine);
    if (n == 0) {
        if (x == 0) return __int_as_float(__float_as_int(x) < 0 ? 0x7f800000 : 0xff800000);
        if (pole) return __int_as_float(0x7fc00000);
        if (x == infinity()) return x;
        double y = x < 0 ? 1 - double(x) : double(x), value = x < 0 ? -pi * cosine / sine : 0.0;
        for (; y < 10; y += 1) value -= 1 / y;
        const double even[8] = {1.0 / 12, -1.0 / 120, 1.0 / 252, -1.0 / 240, 1.0 / 132, -691.0 / 32760, 1.0 / 12, -3617.0 / 8160};
        double sum = 0;
        for (int k = 7; k >= 0; k--) sum = (sum + even[k]) / (y * y);
        return float(value + log(y) - 0.5 / y - sum);
    }
    if (x == infinity()) return 0;
    if (n == 1 && x < 0 && !pole) return float(pi * pi / (sine * sine) - zeta(2, 1 - double(x)));
    double factorial = n % 2 == 0 ? -1 : 1;
    for (int k = 2; k <= n; k++) factorial *= k;
    return float(factorial * (pole ? double(infinity()) : zeta(n + 1, x)));
}

// ---- Storage types that are not types of the language -------------------------------------------

/// IEEE 754 half precision, as stored.
struct f16 {
    unsigned short bits;
};

/// The upper half of a float, as stored.
struct bf16 {
    unsigned short bits;
};

SLABWISE_INLINE float widen(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }

#ifndef SLABWISE_EMULATED
SLABWISE_INLINE float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
SLABWISE_INLINE f16 narrow_f16(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
SLABWISE_INLINE bf16 narrow_bf16(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
#endif

// ---- Memory -------------------------------------------------------------------------------------

#ifndef SLABWISE_EMULATED
/// Reads or writes a whole vector; the address must be a multiple of its size.
template <class V>
SLABWISE_INLINE V load_vec(const void* p) { return *reinterpret_cast<const V*>(p); }
template <class V>
SLABWISE_INLINE void store_vec(void* p, const V& v) { *reinterpret_cast<V*>(p) = v; }

/// Reads what other blocks of the launch wrote: a vector of 1 or 4 floats, past the L1 cache.
template <class V>
SLABWISE_INLINE V load_written(const void* p) {
    if constexpr (sizeof(V) == 16) {
        const float4 x = __ldcg(reinterpret_cast<const float4*>(p));
        return {{x.x, x.y, x.z, x.w}};
    } else {
        return {{__ldcg(reinterpret_cast<const float*>(p))}};
    }
}

/// The same address in global memory, to which the compiler adds others as it is, instead of adding
/// up its parts anew.
template <class T>
SLABWISE_INLINE const T* settled(const T* p) {
    asm("" : "+l"(p));
    __builtin_assume(__isGlobal(p));
    return p;
}
SLABWISE_INLINE int settled(int x) {
    asm("" : "+r"(x));
    return x;
}
SLABWISE_INLINE long long settled(long long x) {
    asm("" : "+l"(x));
    return x;
}

/// A number whose lowest `count` bits are ones: all for more than 31.
SLABWISE_INLINE unsigned low_bits(int count) {
    unsigned bits;
    asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(bits) : "r"(count));
    return bits;
}

/// The lower halves of two registers in one.
SLABWISE_INLINE unsigned pair_of(unsigned first, unsigned second) { return __byte_perm(first, second, 0x5410); }

/// A place in shared memory, as its 32-bit address.
struct Shared {
    unsigned address;

    Shared() = default;
    SLABWISE_METHOD Shared(const void* p) : address(unsigned(__cvta_generic_to_shared(p))) {}
    SLABWISE_METHOD explicit Shared(unsigned address) : address(address) {}
    SLABWISE_METHOD Shared operator+(int bytes) const { return Shared(address + unsigned(bytes)); }
};
SLABWISE_INLINE Shared settled(Shared place) { return Shared(unsigned(settled(int(place.address)))); }
SLABWISE_INLINE void store_element(Shared to, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(to.address), "f"(x) : "memory"); }
template <class Half>
SLABWISE_INLINE void store_element(Shared to, Half x) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(to.address), "h"(x.bits) : "memory"); }
SLABWISE_INLINE unsigned load_one(Shared from) {
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from.address) : "memory");
    return v;
}
SLABWISE_INLINE void load_two(unsigned& first, unsigned& second, Shared from) {
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(first), "=r"(second) : "r"(from.address) : "memory");
}
SLABWISE_INLINE void load_four(unsigned (&v)[4], Shared from) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from.address) : "memory");
}
SLABWISE_INLINE void store_four(Shared to, const unsigned (&v)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to.address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

/// Declares `name`, the dynamic shared memory of the block as elements of `type`.
#define SHARED_BYTES(type, name)                              \
    extern __shared__ __align__(128) unsigned char slabwise_shared[]; \
    type* name = reinterpret_cast<type*>(slabwise_shared)
#endif

// ---- Random numbers: Philox4x32-10, the same bits as on the CPU ---------------------------------

struct Philox {
    unsigned v[4];
};

SLABWISE_INLINE Philox philox(unsigned c0, unsigned c1, unsigned c2, unsigned c3, unsigned k0, unsigned k1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

/// Element `index` of a stream of uniform numbers in [0, 1); `state` holds the seed's two words and
/// the step.
SLABWISE_INLINE float uniform(const int* state, unsigned stream, int index) {
    const unsigned i = unsigned(index);
    const Philox p = philox(i >> 2, stream, unsigned(state[2]), 0u, unsigned(state[0]), unsigned(state[1]));
    const unsigned word = (i & 2) ? ((i & 1) ? p.v[3] : p.v[2]) : ((i & 1) ? p.v[1] : p.v[0]);
    return float(word >> 8) * (1.0f / 16777216.0f);
}

// ---- Reductions ---------------------------------------------------------------------------------

/// The current best element of a search for the largest or smallest: its sort key and its position.
/// Larger keys win; among equal keys, the smaller position.
struct Rank {
    int key;
    int position;
};

SLABWISE_INLINE int rank_largest(int x) { return x; }
SLABWISE_INLINE int rank_smallest(int x) { return ~x; }
/// Floats in ascending order as integers; both zeros are equal.
SLABWISE_INLINE int ordered(float x) {
    const int bits = __float_as_int(x + 0.0f);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}
SLABWISE_INLINE int rank_largest(float x) { return x != x ? 0x7fffffff : ordered(x); }
SLABWISE_INLINE int rank_smallest(float x) { return x != x ? 0x7fffffff : ~ordered(x); }

SLABWISE_INLINE Rank better(Rank a, Rank b) {
    return b.key > a.key || (b.key == a.key && b.position < a.position) ? b : a;
}

/// Lanes of a wave (a warp), and a bit for each.
#ifndef SLABWISE_WAVE
#define SLABWISE_WAVE 32
#endif
static constexpr int WAVE = SLABWISE_WAVE;
#if SLABWISE_WAVE == 64
typedef u64 Lanes;
SLABWISE_INLINE int count_lanes(Lanes lanes) { return __popcll(lanes); }
#else
typedef unsigned Lanes;
SLABWISE_INLINE int count_lanes(Lanes lanes) { return __popc(lanes); }
#endif
static constexpr Lanes ALL_LANES = ~Lanes(0);

/// The lanes of the wave whose flag is true.
SLABWISE_INLINE Lanes ballot(bool yes) { return __ballot_sync(ALL_LANES, yes); }
/// How many of `lanes` come before `lane`.
SLABWISE_INLINE int lanes_before(Lanes lanes, int lane) { return count_lanes(lanes & ((Lanes(1) << lane) - 1)); }

/// A value of another lane of the wave.
template <class T>
SLABWISE_INLINE T from_lane_xor(T x, int mask) { return __shfl_xor_sync(ALL_LANES, x, mask); }
SLABWISE_INLINE bool from_lane_xor(bool x, int mask) { return __shfl_xor_sync(ALL_LANES, int(x), mask) != 0; }
SLABWISE_INLINE Rank from_lane_xor(Rank x, int mask) {
    return {__shfl_xor_sync(ALL_LANES, x.key, mask), __shfl_xor_sync(ALL_LANES, x.position, mask)};
}

// ---- Tensor cores and asynchronous copies -------------------------------------------------------

#ifndef SLABWISE_EMULATED
/// Four 8×8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8.
SLABWISE_INLINE void ldmatrix_x4(unsigned (&r)[4], Shared row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row.address)
                 : "memory");
}
SLABWISE_INLINE void ldmatrix_x4_trans(unsigned (&r)[4], Shared row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row.address)
                 : "memory");
}
SLABWISE_INLINE void ldmatrix_x2(unsigned (&r)[2], Shared row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(row.address)
                 : "memory");
}
SLABWISE_INLINE void ldmatrix_x2_trans(unsigned (&r)[2], Shared row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(row.address)
                 : "memory");
}

/// d += a · b, each operand distributed over the warp as the PTX manual specifies.
SLABWISE_INLINE void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
SLABWISE_INLINE void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
SLABWISE_INLINE void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/// The nearest tf32, as an operand of `mma_m16n8k8_tf32`; of two that are equally near, the even one
/// where a single instruction computes it, and the one away from zero elsewhere.
SLABWISE_INLINE unsigned round_tf32(float x) {
    unsigned y;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
#endif
    return y;
}

/// Starts a copy of BYTES (4, 8 or 16, and aligned to that) from global to shared memory; zeros
/// where `wanted` is 0.
template <int BYTES>
SLABWISE_INLINE void copy_async(Shared to, const void* from, unsigned wanted) {
    if constexpr (BYTES == 16)
        asm volatile("{.reg .pred none; setp.eq.u32 none, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, none;}" ::"r"(to.address), "l"(from),
                     "r"(wanted)
                     : "memory");
    else
        asm volatile("{.reg .pred none; setp.eq.u32 none, %3, 0; cp.async.ca.shared.global [%0], [%1], %2, none;}" ::"r"(to.address), "l"(from),
                     "n"(BYTES), "r"(wanted)
                     : "memory");
}
/// The same of 16 bytes, of which the first `present` exist; zeros behind those.
SLABWISE_INLINE void copy_async_part(Shared to, const void* from, int present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to.address), "l"(from), "r"(present) : "memory");
}
SLABWISE_INLINE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most PENDING groups of this thread are in flight.
template <int PENDING>
SLABWISE_INLINE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
#endif
