/* A cuBLASLt without a device, for tests: products in plain C, as work of the streams of
 * fake_libcuda.c.
 *
 * It returns the library's errors (for inconsistent types, layouts and sizes, too little workspace,
 * addresses outside of the device's memory), offers several algorithms, of which one splits sums
 * into parts in the workspace, and fails when the driver is set to make it fail. It works while the
 * driver's number `library` is 1.
 *
 * Built as a shared object whose name (SONAME) is libcublasLt.so. Numbers of types and attributes
 * are those of cublasLt.h. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Status;
enum { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_16F = 2, R_16BF = 14, COMPUTE_32F = 68, COMPUTE_32F_FAST_TF32 = 77, EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4,
       SCHEME_IN_PLACE = 1, SCHEME_COMPUTE_TYPE = 2 };

/* ---- The driver underneath ------------------------------------------------------------------- */

static void* driver(const char* name) {
    void* object = dlopen("libcuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* found = object ? dlsym(object, name) : NULL;
    if (!found) {
        fprintf(stderr, "the driver without a device has no %s\n", name);
        abort();
    }
    return found;
}
/* The status that a call is set to fail with, its own or an unknown one; for errors of the driver,
 * that of failed work. */
static Status told_to_fail(const char* call) {
    int told = ((int (*)(const char*))driver("fake_enter"))(call);
    return told < 0 || (told > NOT_SUPPORTED && told < 10000) ? EXECUTION_FAILED : told;
}
/* Allocates memory and loads code, which only some modes of capture allow. */
static int unsafe(const char* call) { return ((int (*)(const char*))driver("fake_unsafe"))(call); }
static long long number(const char* name) { return ((long long (*)(const char*))driver("fake_get"))(name); }
static int inside(uint64_t at, uint64_t bytes) { return ((int (*)(uint64_t, size_t))driver("fake_inside"))(at, bytes); }

/* ---- Descriptors of a product ---------------------------------------------------------------- */

typedef struct { int type; uint64_t rows, columns; int64_t stride; int32_t products; int64_t apart; } Layout;
typedef struct { int compute, scale, turned[2], bias_type; uint32_t epilogue; uint64_t bias; } Product;
typedef struct { uint64_t workspace_max; uint32_t schemes, align[4]; } Preference;
typedef struct { uint64_t mark, id, scheme, parts, rest[4]; } Algorithm;
typedef struct { Algorithm algorithm; size_t workspace; Status state; float waves; int reserved[4]; } Answer;
static const uint64_t MARK = 0x51ab;
/* With split sums, in place, plain, and for vectors only. */
static const Algorithm ALGORITHMS[] = {
    {MARK, 21, 0, 1, {0}}, {MARK, 22, SCHEME_IN_PLACE, 2, {0}}, {MARK, 23, SCHEME_COMPUTE_TYPE, 3, {0}}, {MARK, 24, 0, 1, {0}}};
enum { FOR_VECTORS = 24 };

size_t cublasLtGetVersion(void) { return 130002; }
Status cublasLtCreate(void** to) {
    Status told = told_to_fail(__func__);
    if (told) return told;
    if (!number("library")) return NOT_INITIALIZED;
    if (unsafe(__func__)) return NOT_INITIALIZED;
    *to = malloc(1);
    return SUCCESS;
}
Status cublasLtDestroy(void* at) { free(at); return SUCCESS; }

Status cublasLtMatrixLayoutCreate(Layout** to, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    *to = malloc(sizeof **to);
    **to = (Layout){type, rows, columns, stride, 1, 0};
    return SUCCESS;
}
Status cublasLtMatrixLayoutDestroy(Layout* at) { free(at); return SUCCESS; }
Status cublasLtMatrixLayoutSetAttribute(Layout* at, int which, const void* value, size_t bytes) {
    if (which == 5 && bytes == 4) at->products = *(const int32_t*)value;
    else if (which == 6 && bytes == 8) at->apart = *(const int64_t*)value;
    else return INVALID_VALUE;
    return SUCCESS;
}
Status cublasLtMatmulDescCreate(Product** to, int compute, int scale) {
    *to = malloc(sizeof **to);
    **to = (Product){.compute = compute, .scale = scale, .epilogue = EPILOGUE_DEFAULT};
    return SUCCESS;
}
Status cublasLtMatmulDescDestroy(Product* at) { free(at); return SUCCESS; }
Status cublasLtMatmulDescSetAttribute(Product* at, int which, const void* value, size_t bytes) {
    if (which == 3 && bytes == 4) at->turned[0] = *(const int32_t*)value;
    else if (which == 4 && bytes == 4) at->turned[1] = *(const int32_t*)value;
    else if (which == 7 && bytes == 4) at->epilogue = *(const uint32_t*)value;
    else if (which == 8 && bytes == 8) at->bias = *(const uint64_t*)value;
    else if (which == 26 && bytes == 4) at->bias_type = *(const int32_t*)value;
    else return INVALID_VALUE;
    return SUCCESS;
}
Status cublasLtMatmulPreferenceCreate(Preference** to) {
    *to = malloc(sizeof **to);
    **to = (Preference){0, 7, {256, 256, 256, 256}};
    return SUCCESS;
}
Status cublasLtMatmulPreferenceDestroy(Preference* at) { free(at); return SUCCESS; }
Status cublasLtMatmulPreferenceSetAttribute(Preference* at, int which, const void* value, size_t bytes) {
    if (which == 1 && bytes == 8) at->workspace_max = *(const uint64_t*)value;
    else if (which == 3 && bytes == 4) at->schemes = *(const uint32_t*)value;
    else if (which >= 5 && which <= 8 && bytes == 4) at->align[which - 5] = *(const uint32_t*)value;
    else return INVALID_VALUE;
    return SUCCESS;
}
Status cublasLtMatmulAlgoConfigGetAttribute(const Algorithm* at, int which, void* value, size_t bytes, size_t* written) {
    if (at->mark != MARK || bytes != 4) return INVALID_VALUE;
    uint64_t known[] = {at->id, 0, at->parts, at->scheme};
    if (which < 0 || which > 3) return INVALID_VALUE;
    *(uint32_t*)value = (uint32_t)known[which];
    *written = 4;
    return SUCCESS;
}

/* ---- Validation ------------------------------------------------------------------------------ */

static uint64_t width(int type) { return type == R_32F ? 4 : type == R_16F || type == R_16BF ? 2 : 0; }
static int is_sound(const Layout* l) {
    return width(l->type) && l->rows && l->columns && l->stride >= (int64_t)l->rows && l->products >= 1 && l->apart >= 0;
}
/* Rows, columns and contracted elements. */
static void sizes(const Product* p, const Layout* a, const Layout* b, uint64_t s[3]) {
    s[0] = p->turned[0] ? a->columns : a->rows;
    s[1] = p->turned[1] ? b->rows : b->columns;
    s[2] = p->turned[0] ? a->rows : a->columns;
}
static Status sound(const Product* p, const Layout* a, const Layout* b, const Layout* c, const Layout* d) {
    uint64_t s[3];
    if (!is_sound(a) || !is_sound(b) || !is_sound(c) || !is_sound(d)) return INVALID_VALUE;
    sizes(p, a, b, s);
    if ((p->turned[1] ? b->columns : b->rows) != s[2] || d->rows != s[0] || d->columns != s[1]) return INVALID_VALUE;
    if (memcmp(c, d, sizeof *c) || a->products != b->products || a->products != d->products) return INVALID_VALUE;
    if (a->type != b->type || (d->type != R_32F && d->type != a->type) || p->scale != R_32F) return NOT_SUPPORTED;
    if (p->compute != COMPUTE_32F && (p->compute != COMPUTE_32F_FAST_TF32 || a->type != R_32F)) return NOT_SUPPORTED;
    if (p->epilogue != EPILOGUE_DEFAULT && p->epilogue != EPILOGUE_BIAS) return NOT_SUPPORTED;
    if (p->epilogue == EPILOGUE_BIAS && (p->bias_type != d->type || !p->bias || p->bias % width(d->type))) return INVALID_VALUE;
    return SUCCESS;
}
static uint64_t workspace(const Algorithm* at, const Layout* d) {
    return at->parts > 1 ? 4 * at->parts * d->rows * d->columns * (uint64_t)d->products : 0;
}
/* Whether the algorithm exists and computes this. */
static int does(const Algorithm* at, const Layout* d) {
    for (size_t i = 0; i < sizeof ALGORITHMS / sizeof *ALGORITHMS; ++i)
        if (!memcmp(at, &ALGORITHMS[i], sizeof *at)) return at->id != FOR_VECTORS || d->rows % 8 == 0;
    return 0;
}
Status cublasLtMatmulAlgoGetHeuristic(void* handle, const Product* p, const Layout* a, const Layout* b, const Layout* c, const Layout* d,
                                      const Preference* preference, int wanted, Answer* answers, int* count) {
    (void)handle;
    Status told = told_to_fail(__func__), wrong = sound(p, a, b, c, d);
    if (told || wrong) return told ? told : wrong;
    *count = 0;
    for (size_t i = 0; i < sizeof ALGORITHMS / sizeof *ALGORITHMS && *count < wanted; ++i) {
        const Algorithm* at = &ALGORITHMS[i];
        uint64_t bytes = workspace(at, d);
        const uint32_t* align = preference->align;
        int aligned = align[0] % 16 == 0 && align[1] % 16 == 0 && align[2] % 16 == 0 && align[3] % 16 == 0;
        if (bytes > preference->workspace_max || (at->scheme & ~preference->schemes) || !does(at, d) || (at->id == FOR_VECTORS && !aligned))
            continue;
        answers[(*count)++] = (Answer){.algorithm = *at, .workspace = bytes, .state = SUCCESS, .waves = 1};
    }
    return *count ? SUCCESS : NOT_SUPPORTED;
}
Status cublasLtMatmulAlgoCheck(void* handle, const Product* p, const Layout* a, const Layout* b, const Layout* c, const Layout* d,
                               const Algorithm* at, Answer* answer) {
    (void)handle;
    Status told = told_to_fail(__func__), wrong = sound(p, a, b, c, d);
    if (told || wrong) return told ? told : wrong;
    if (!does(at, d)) return INVALID_VALUE;
    *answer = (Answer){.algorithm = *at, .workspace = workspace(at, d), .state = SUCCESS, .waves = 1};
    return SUCCESS;
}

/* ---- The product ----------------------------------------------------------------------------- */

typedef struct { Product product; Layout a, b, d; Algorithm algorithm; float alpha, beta; uint64_t at[5]; } Job;

static float get(uint64_t base, int type, uint64_t i) {
    if (type == R_32F) return ((const float*)base)[i];
    if (type == R_16F) return (float)((const _Float16*)base)[i];
    uint32_t bits = (uint32_t)((const uint16_t*)base)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static void put(uint64_t base, int type, uint64_t i, float x) {
    if (type == R_32F) { ((float*)base)[i] = x; return; }
    if (type == R_16F) { ((_Float16*)base)[i] = (_Float16)x; return; }
    uint32_t bits;
    memcpy(&bits, &x, 4);
    /* To nearest, ties to even; NaN stays NaN. */
    ((uint16_t*)base)[i] = (uint16_t)(x != x ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static int lies(const Layout* l, uint64_t at) {
    uint64_t elements = (uint64_t)(l->products - 1) * (uint64_t)l->apart + (l->columns - 1) * (uint64_t)l->stride + l->rows;
    return at % width(l->type) == 0 && inside(at, elements * width(l->type));
}
static const char* multiply(const void* data) {
    const Job* job = data;
    const Layout *a = &job->a, *b = &job->b, *d = &job->d;
    uint64_t s[3], parts = job->algorithm.parts;
    sizes(&job->product, a, b, s);
    uint64_t points = s[0] * s[1] * (uint64_t)d->products;
    if (!lies(a, job->at[0]) || !lies(b, job->at[1]) || !lies(d, job->at[2]) || !lies(d, job->at[3])) return "an operand is no memory of the device";
    if (parts > 1 && !inside(job->at[4], 4 * parts * points)) return "the workspace is no memory of the device";
    int biased = job->product.epilogue == EPILOGUE_BIAS;
    if (biased && !inside(job->product.bias, s[0] * width(d->type))) return "the bias is no memory of the device";
    float* sums = parts > 1 ? (float*)job->at[4] : malloc(4 * points);
    uint64_t length = (s[2] + parts - 1) / parts;
    for (uint64_t part = 0; part < parts; ++part)
        for (uint64_t q = 0; q < (uint64_t)d->products; ++q)
            for (uint64_t j = 0; j < s[1]; ++j)
                for (uint64_t i = 0; i < s[0]; ++i) {
                    float sum = 0;
                    for (uint64_t k = part * length; k < s[2] && k < (part + 1) * length; ++k) {
                        uint64_t left = job->product.turned[0] ? k + i * (uint64_t)a->stride : i + k * (uint64_t)a->stride;
                        uint64_t right = job->product.turned[1] ? j + k * (uint64_t)b->stride : k + j * (uint64_t)b->stride;
                        sum += get(job->at[0], a->type, q * (uint64_t)a->apart + left) * get(job->at[1], b->type, q * (uint64_t)b->apart + right);
                    }
                    sums[((part * (uint64_t)d->products + q) * s[1] + j) * s[0] + i] = sum;
                }
    for (uint64_t q = 0; q < (uint64_t)d->products; ++q)
        for (uint64_t j = 0; j < s[1]; ++j)
            for (uint64_t i = 0; i < s[0]; ++i) {
                float sum = 0;
                for (uint64_t part = 0; part < parts; ++part) sum += sums[((part * (uint64_t)d->products + q) * s[1] + j) * s[0] + i];
                uint64_t to = q * (uint64_t)d->apart + j * (uint64_t)d->stride + i;
                sum *= job->alpha;
                if (job->beta != 0) sum += job->beta * get(job->at[2], d->type, to);
                if (biased) sum += get(job->product.bias, d->type, i);
                put(job->at[3], d->type, to, sum);
            }
    if (parts == 1) free(sums);
    return NULL;
}
Status cublasLtMatmul(void* handle, const Product* p, const float* alpha, uint64_t a, const Layout* la, uint64_t b, const Layout* lb,
                      const float* beta, uint64_t c, const Layout* lc, uint64_t d, const Layout* ld, const Algorithm* at, uint64_t space,
                      size_t space_bytes, void* stream) {
    (void)handle;
    Status told = told_to_fail(__func__), wrong = sound(p, la, lb, lc, ld);
    if (told || wrong) return told ? told : wrong;
    if (!does(at, ld) || workspace(at, ld) > space_bytes || space % 256) return INVALID_VALUE;
    /* Unlike the heuristics, the check of an algorithm knows no addresses. */
    if (at->id == FOR_VECTORS && (a | b | c | d) % 16) return NOT_SUPPORTED;
    /* Code is loaded at its first use. */
    static unsigned loaded;
    if (!(loaded >> at->id & 1) && unsafe(__func__)) return EXECUTION_FAILED;
    loaded |= 1u << at->id;
    Job job = {*p, *la, *lb, *ld, *at, *alpha, *beta, {a, b, c, d, space}};
    char name[64];
    snprintf(name, sizeof name, "cublaslt_%d%s", (int)at->id, p->compute == COMPUTE_32F_FAST_TF32 ? "_tf32" : "");
    typedef int Submit(void*, const char* (*)(const void*), const void*, size_t, const char*);
    return ((Submit*)driver("fake_submit"))(stream, multiply, &job, sizeof job, name) ? EXECUTION_FAILED : SUCCESS;
}
