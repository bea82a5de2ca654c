/* A cuDNN without a device, for tests: convolutions in plain C, as work of the streams of
 * fake_libcuda.c.
 *
 * It returns the library's errors (for unset descriptors, inconsistent types, shapes and strides,
 * too little workspace, addresses outside of the device's memory, work on another stream than that
 * of the run, calls for a handle whose stream was destroyed), offers several algorithms, of which
 * some are not deterministic, round products that must not be rounded, or need a large workspace, and
 * fails when the driver is set to make it fail.
 * It works while the driver's number `cudnn` is 1.
 *
 * Built as a shared object whose name (SONAME) is libcudnn.so. Numbers of types and algorithms are
 * those of cudnn_graph.h, cudnn_ops.h and cudnn_cnn.h of version 9. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Status;
enum { SUCCESS = 0, NOT_INITIALIZED = 1001, BAD_PARAM = 2000, NOT_FINALIZED = 2004, SIZE_INSUFFICIENT = 2006, STREAM_MISMATCH = 2007,
       SHAPE_MISMATCH = 2008, NOT_SUPPORTED = 3000, NOT_SUPPORTED_LAYOUT = 3004, EXECUTION_FAILED = 5000 };
enum { FLOAT = 0, HALF = 2, BFLOAT16 = 9 };
enum { DEFAULT_MATH = 0, TENSOR_OP_MATH = 1, ALLOW_CONVERSION = 2, FMA_MATH = 3 };
enum { FORWARD, DATA, FILTER };

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
/* The status that a call is set to fail with; for errors of the driver, that of failed work. */
static Status told_to_fail(const char* call) {
    int told = ((int (*)(const char*))driver("fake_enter"))(call);
    return told == 0 || told >= NOT_INITIALIZED ? told : EXECUTION_FAILED;
}
/* Allocates memory and loads code, which only some modes of capture allow. */
static int unsafe(const char* call) { return ((int (*)(const char*))driver("fake_unsafe"))(call); }
static long long number(const char* name) { return ((long long (*)(const char*))driver("fake_get"))(name); }
static int inside(uint64_t at, uint64_t bytes) { return ((int (*)(uint64_t, size_t))driver("fake_inside"))(at, bytes); }

/* ---- Descriptors of a convolution ------------------------------------------------------------ */

/* A tensor of images or a weight; `dims[0]` is 0 until it is set. */
typedef struct { int type, dims[4], strides[4], is_filter; } Tensor;
typedef struct { int set, pad[2], stride[2], dilation[2], groups, math; } Convolution;
typedef struct { void* stream; } Handle;
typedef struct { int algorithm; Status status; float time; size_t memory; int determinism, math, reserved[3]; } Performance;

static __thread char last_error[256];
static Status fails(Status status, const char* why) {
    snprintf(last_error, sizeof last_error, "%s", why);
    return status;
}

/* Whether the stream of a handle, if one is set, exists. */
static int is_sound_handle(const Handle* at) { return at && (!at->stream || ((int (*)(const void*))driver("fake_lives"))(at->stream)); }

size_t cudnnGetVersion(void) { return 92801; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char* cudnnGetErrorString(Status status) {
    switch (status) {
        case SUCCESS: return "CUDNN_STATUS_SUCCESS";
        case NOT_INITIALIZED: return "CUDNN_STATUS_NOT_INITIALIZED";
        case NOT_FINALIZED: return "CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED";
        case SIZE_INSUFFICIENT: return "CUDNN_STATUS_BAD_PARAM_SIZE_INSUFFICIENT";
        case STREAM_MISMATCH: return "CUDNN_STATUS_BAD_PARAM_STREAM_MISMATCH";
        case SHAPE_MISMATCH: return "CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH";
        case NOT_SUPPORTED: return "CUDNN_STATUS_NOT_SUPPORTED";
        case NOT_SUPPORTED_LAYOUT: return "CUDNN_STATUS_NOT_SUPPORTED_LAYOUT";
        case EXECUTION_FAILED: return "CUDNN_STATUS_EXECUTION_FAILED";
        default: return "CUDNN_STATUS_BAD_PARAM";
    }
}
void cudnnGetLastErrorString(char* message, size_t bytes) {
    snprintf(message, bytes, "%s", last_error);
    *last_error = 0;
}

Status cudnnCreate(Handle** to) {
    Status told = told_to_fail(__func__);
    if (told) return told;
    if (!number("cudnn")) return fails(NOT_INITIALIZED, "there is no such library now");
    if (unsafe(__func__)) return fails(NOT_INITIALIZED, "work is recorded");
    *to = calloc(1, sizeof **to);
    return SUCCESS;
}
Status cudnnDestroy(Handle* at) { free(at); return SUCCESS; }
Status cudnnSetStream(Handle* at, void* stream) {
    Status told = told_to_fail(__func__);
    if (told) return told;
    if (!is_sound_handle(at)) return fails(STREAM_MISMATCH, "the stream before this one was destroyed");
    at->stream = stream;
    return SUCCESS;
}
Status cudnnCreateTensorDescriptor(Tensor** to) { *to = calloc(1, sizeof **to); return SUCCESS; }
Status cudnnDestroyTensorDescriptor(Tensor* at) { free(at); return SUCCESS; }
Status cudnnCreateFilterDescriptor(Tensor** to) {
    *to = calloc(1, sizeof **to);
    (*to)->is_filter = 1;
    return SUCCESS;
}
Status cudnnDestroyFilterDescriptor(Tensor* at) { free(at); return SUCCESS; }
Status cudnnCreateConvolutionDescriptor(Convolution** to) {
    *to = calloc(1, sizeof **to);
    (*to)->groups = 1;
    return SUCCESS;
}
Status cudnnDestroyConvolutionDescriptor(Convolution* at) { free(at); return SUCCESS; }

static int width(int type) { return type == FLOAT ? 4 : type == HALF || type == BFLOAT16 ? 2 : 0; }

Status cudnnSetTensorNdDescriptor(Tensor* at, int type, int count, const int* dims, const int* strides) {
    int64_t last = 1;
    if (at->is_filter || !width(type)) return fails(BAD_PARAM, "a tensor of a type that has none");
    if (count != 4) return fails(NOT_SUPPORTED, "a tensor of other than four axes");
    for (int i = 0; i < 4; ++i) {
        if (dims[i] < 1 || strides[i] < 1) return fails(BAD_PARAM, "a tensor with an axis of no elements, or no steps");
        last += (int64_t)(dims[i] - 1) * strides[i];
    }
    if (last > INT32_MAX) return fails(NOT_SUPPORTED, "a tensor of more than 2 Gi elements");
    at->type = type;
    memcpy(at->dims, dims, sizeof at->dims);
    memcpy(at->strides, strides, sizeof at->strides);
    return SUCCESS;
}
Status cudnnSetFilterNdDescriptor(Tensor* at, int type, int format, int count, const int* dims) {
    if (!at->is_filter || !width(type) || (format != 0 && format != 1)) return fails(BAD_PARAM, "a filter of an unknown kind");
    if (count != 4) return fails(NOT_SUPPORTED, "a filter of other than four axes");
    static const int ORDERS[2][4] = {{3, 2, 1, 0}, {1, 3, 2, 0}};
    int64_t stride = 1;
    at->type = type;
    for (int i = 0; i < 4; ++i) {
        int axis = ORDERS[format][i];
        if (dims[axis] < 1) return fails(BAD_PARAM, "a filter with an axis of no elements");
        at->dims[axis] = dims[axis];
        at->strides[axis] = (int)stride;
        stride *= dims[axis];
    }
    return SUCCESS;
}
Status cudnnSetConvolutionNdDescriptor(Convolution* at, int count, const int* pad, const int* stride, const int* dilation, int mode,
                                       int compute) {
    if (count != 2 || compute != FLOAT) return fails(NOT_SUPPORTED, "a convolution of other than two axes, or not in f32");
    if (mode != 1) return fails(BAD_PARAM, "a convolution that is none of correlation");
    for (int i = 0; i < 2; ++i) {
        if (pad[i] < 0 || stride[i] < 1 || dilation[i] < 1) return fails(BAD_PARAM, "a convolution with wrong steps");
        at->pad[i] = pad[i], at->stride[i] = stride[i], at->dilation[i] = dilation[i];
    }
    at->set = 1;
    return SUCCESS;
}
Status cudnnSetConvolutionGroupCount(Convolution* at, int groups) {
    if (groups < 1) return fails(BAD_PARAM, "a convolution of no groups");
    at->groups = groups;
    return SUCCESS;
}
Status cudnnSetConvolutionMathType(Convolution* at, int math) {
    if (math < DEFAULT_MATH || math > FMA_MATH) return fails(BAD_PARAM, "an unknown kind of products");
    at->math = math;
    return SUCCESS;
}

/* ---- Validation ------------------------------------------------------------------------------ */

/* Operands in the order of the calls, the result last. */
typedef struct { Tensor image, weight, result; } Tensors;

static Tensors in_order(int kind, const Tensor* a, const Tensor* b, const Tensor* to) {
    return kind == FORWARD ? (Tensors){*a, *b, *to} : kind == DATA ? (Tensors){*to, *a, *b} : (Tensors){*a, *to, *b};
}
/* Whether no two elements share an address: ordered by strides, each axis strides over all before
 * it. */
static int is_injective(const Tensor* t) {
    int done[4] = {0};
    int64_t reach = 0;
    for (int i = 0; i < 4; ++i) {
        int least = -1;
        for (int axis = 0; axis < 4; ++axis)
            if (!done[axis] && (least < 0 || t->strides[axis] < t->strides[least])) least = axis;
        done[least] = 1;
        if (t->dims[least] == 1) continue;
        if (t->strides[least] <= reach) return 0;
        reach += (int64_t)(t->dims[least] - 1) * t->strides[least];
    }
    return 1;
}
static Status sound(int kind, const Tensor* a, const Tensor* b, const Convolution* c, const Tensor* to) {
    Tensors t = in_order(kind, a, b, to);
    if (t.image.is_filter || !t.weight.is_filter || t.result.is_filter) return fails(BAD_PARAM, "a filter for a tensor");
    if (!c->set || !t.image.dims[0] || !t.weight.dims[0] || !t.result.dims[0]) return fails(NOT_FINALIZED, "a descriptor is not set");
    if (t.image.type != t.weight.type || t.image.type != t.result.type) return fails(NOT_SUPPORTED, "tensors of several types");
    const int *x = t.image.dims, *w = t.weight.dims, *y = t.result.dims;
    if (x[0] != y[0] || x[1] != w[1] * c->groups || y[1] != w[0] || w[0] % c->groups) return fails(SHAPE_MISMATCH, "channels do not fit");
    for (int i = 0; i < 2; ++i) {
        int room = x[2 + i] + 2 * c->pad[i] - ((w[2 + i] - 1) * c->dilation[i] + 1);
        if (room < 0 || room / c->stride[i] + 1 != y[2 + i]) return fails(SHAPE_MISMATCH, "rows or columns do not fit");
    }
    if (!is_injective(&t.image) || !is_injective(&t.result)) return fails(NOT_SUPPORTED_LAYOUT, "elements of a tensor overlap");
    return SUCCESS;
}
static uint64_t points(const Tensor* t) { return (uint64_t)t->dims[0] * (uint64_t)t->dims[1] * (uint64_t)t->dims[2] * (uint64_t)t->dims[3]; }

/* The algorithms, in the order of the library's estimates: a number, whether it gives the same bits
 * on each run, and its workspace: nothing, as much as the result, or far too much. */
static const struct { int number, deterministic, needs; } ALGORITHMS[3][6] = {
    {{6, 1, 1}, {1, 1, 1}, {3, 0, 0}, {0, 1, 0}, {4, 1, 2}, {2, 1, 2}},
    {{0, 0, 0}, {1, 1, 1}, {5, 1, 0}, {4, 1, 0}, {2, 1, 2}, {3, 1, 2}},
    {{0, 0, 0}, {3, 0, 1}, {1, 1, 1}, {5, 1, 0}, {2, 1, 2}, {6, 1, 2}}};

static uint64_t workspace(int kind, int number, const Tensor* to) {
    for (int i = 0; i < 6; ++i)
        if (ALGORITHMS[kind][i].number == number) {
            int needs = ALGORITHMS[kind][i].needs;
            return needs == 0 ? 0 : needs == 1 ? 4 * points(to) : 1ull << 40;
        }
    return UINT64_MAX;
}
static Status heuristics(const char* call, int kind, const Tensor* a, const Tensor* b, const Convolution* c, const Tensor* to, int wanted,
                         int* count, Performance* answers) {
    Status told = told_to_fail(call), wrong = sound(kind, a, b, c, to);
    if (told || wrong) return told ? told : wrong;
    if (wanted < 1) return fails(BAD_PARAM, "room for no algorithm");
    *count = 0;
    for (int i = 0; i < 6 && *count < wanted; ++i) {
        int number = ALGORITHMS[kind][i].number;
        answers[(*count)++] = (Performance){.algorithm = number, .time = (float)i, .memory = workspace(kind, number, to),
                                            .determinism = ALGORITHMS[kind][i].deterministic,
                                            .math = c->math == FMA_MATH ? DEFAULT_MATH : c->math};
    }
    /* One that rounds products further, whatever was requested, and one without a kernel. */
    if (*count < wanted)
        answers[(*count)++] = (Performance){.algorithm = 1, .determinism = 1, .math = a->type == FLOAT ? ALLOW_CONVERSION : DEFAULT_MATH};
    if (*count < wanted) answers[(*count)++] = (Performance){.algorithm = 2, .status = NOT_SUPPORTED, .determinism = 1, .math = c->math};
    return SUCCESS;
}
static Status asked_workspace(const char* call, int kind, const Tensor* a, const Tensor* b, const Convolution* c, const Tensor* to,
                              int number, size_t* bytes) {
    Status told = told_to_fail(call), wrong = sound(kind, a, b, c, to);
    if (told || wrong) return told ? told : wrong;
    uint64_t needed = workspace(kind, number, to);
    if (needed == UINT64_MAX) return fails(NOT_SUPPORTED, "an algorithm that there is none of");
    *bytes = needed;
    return SUCCESS;
}

/* ---- The convolution ------------------------------------------------------------------------- */

typedef struct { int kind; Tensors t; Convolution c; float alpha, beta; uint64_t image, weight, result, space, space_bytes; } Job;

static float get(uint64_t base, int type, int64_t i) {
    if (type == FLOAT) return ((const float*)base)[i];
    if (type == HALF) return (float)((const _Float16*)base)[i];
    uint32_t bits = (uint32_t)((const uint16_t*)base)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static void put(uint64_t base, int type, int64_t i, float x) {
    if (type == FLOAT) { ((float*)base)[i] = x; return; }
    if (type == HALF) { ((_Float16*)base)[i] = (_Float16)x; return; }
    uint32_t bits;
    memcpy(&bits, &x, 4);
    /* To nearest, ties to even; NaN stays NaN. */
    ((uint16_t*)base)[i] = (uint16_t)(x != x ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static int64_t place(const Tensor* t, int a, int b, int c, int d) {
    return (int64_t)a * t->strides[0] + (int64_t)b * t->strides[1] + (int64_t)c * t->strides[2] + (int64_t)d * t->strides[3];
}
static int lies(const Tensor* t, uint64_t at) {
    int64_t last = place(t, t->dims[0] - 1, t->dims[1] - 1, t->dims[2] - 1, t->dims[3] - 1);
    return at % 16 == 0 && inside(at, (uint64_t)(last + 1) * (uint64_t)width(t->type));
}
static const char* convolve(const void* data) {
    const Job* job = data;
    const Tensor *x = &job->t.image, *w = &job->t.weight, *y = &job->t.result;
    if (!lies(x, job->image) || !lies(w, job->weight) || !lies(y, job->result)) return "a tensor is no memory of the device, or misaligned";
    if (job->space_bytes && !inside(job->space, job->space_bytes)) return "the workspace is no memory of the device";
    if (job->space_bytes) memset((void*)job->space, 0xee, job->space_bytes);
    const Tensor* to = job->kind == FORWARD ? y : job->kind == DATA ? x : w;
    uint64_t to_base = job->kind == FORWARD ? job->result : job->kind == DATA ? job->image : job->weight;
    const int *d = to->dims, per_in = w->dims[1], per_out = w->dims[0] / job->c.groups;
    float* sums = calloc(points(to), 4);
    for (int n = 0; n < y->dims[0]; ++n)
        for (int o = 0; o < y->dims[1]; ++o)
            for (int oh = 0; oh < y->dims[2]; ++oh)
                for (int ow = 0; ow < y->dims[3]; ++ow)
                    for (int i = 0; i < per_in; ++i)
                        for (int kh = 0; kh < w->dims[2]; ++kh)
                            for (int kw = 0; kw < w->dims[3]; ++kw) {
                                int h = oh * job->c.stride[0] + kh * job->c.dilation[0] - job->c.pad[0];
                                int v = ow * job->c.stride[1] + kw * job->c.dilation[1] - job->c.pad[1];
                                if (h < 0 || v < 0 || h >= x->dims[2] || v >= x->dims[3]) continue;
                                int channel = o / per_out * per_in + i;
                                int64_t in_x = place(x, n, channel, h, v), in_w = place(w, o, i, kh, kw), in_y = place(y, n, o, oh, ow);
                                int at[4] = {n, o, oh, ow};
                                if (job->kind == DATA) at[1] = channel, at[2] = h, at[3] = v;
                                if (job->kind == FILTER) at[0] = o, at[1] = i, at[2] = kh, at[3] = kw;
                                float left = job->kind == DATA ? get(job->result, y->type, in_y) : get(job->image, x->type, in_x);
                                float right = job->kind == FILTER ? get(job->result, y->type, in_y) : get(job->weight, w->type, in_w);
                                sums[((at[0] * (int64_t)d[1] + at[1]) * d[2] + at[2]) * d[3] + at[3]] += left * right;
                            }
    const float* sum = sums;
    for (int a = 0; a < d[0]; ++a)
        for (int b = 0; b < d[1]; ++b)
            for (int c = 0; c < d[2]; ++c)
                for (int e = 0; e < d[3]; ++e) {
                    int64_t at = place(to, a, b, c, e);
                    float value = job->alpha * *sum++;
                    if (job->beta != 0) value += job->beta * get(to_base, to->type, at);
                    put(to_base, to->type, at, value);
                }
    free(sums);
    return NULL;
}
static Status run(const char* call, int kind, Handle* handle, const float* alpha, const Tensor* da, uint64_t a, const Tensor* db, uint64_t b,
                  const Convolution* c, int number, uint64_t space, size_t space_bytes, const float* beta, const Tensor* dto, uint64_t to) {
    Status told = told_to_fail(call), wrong = sound(kind, da, db, c, dto);
    if (told || wrong) return told ? told : wrong;
    if (!alpha || !beta || !a || !b || !to) return fails(BAD_PARAM, "an address that is none");
    uint64_t needed = workspace(kind, number, dto);
    if (needed == UINT64_MAX) return fails(NOT_SUPPORTED, "an algorithm that there is none of");
    if (needed > space_bytes || (needed && !space)) return fails(SIZE_INSUFFICIENT, "too little workspace");
    if (!handle->stream) return fails(STREAM_MISMATCH, "work on the default stream");
    /* Code is loaded at its first use. */
    static unsigned loaded[3];
    if (!(loaded[kind] >> number & 1) && unsafe(call)) return fails(EXECUTION_FAILED, "code is loaded while work is recorded");
    loaded[kind] |= 1u << number;
    Job job = {.kind = kind, .t = in_order(kind, da, db, dto), .c = *c, .alpha = *alpha, .beta = *beta, .space = space, .space_bytes = needed};
    job.image = kind == DATA ? to : a;
    job.weight = kind == FORWARD ? b : kind == DATA ? a : to;
    job.result = kind == FORWARD ? to : b;
    char name[64];
    static const char* const KINDS[] = {"forward", "data", "filter"};
    snprintf(name, sizeof name, "cudnn_%s_%d%s", KINDS[kind], number, c->math == FMA_MATH ? "_plain" : "");
    typedef int Submit(void*, const char* (*)(const void*), const void*, size_t, const char*);
    return ((Submit*)driver("fake_submit"))(handle->stream, convolve, &job, sizeof job, name) ? EXECUTION_FAILED : SUCCESS;
}

#define CALLS_OF(kind, heuristics_call, workspace_call, run_call) \
    Status heuristics_call(Handle* handle, const Tensor* a, const Tensor* b, const Convolution* c, const Tensor* to, int wanted, int* count, \
                           Performance* answers) { \
        return is_sound_handle(handle) ? heuristics(__func__, kind, a, b, c, to, wanted, count, answers) : BAD_PARAM; \
    } \
    Status workspace_call(Handle* handle, const Tensor* a, const Tensor* b, const Convolution* c, const Tensor* to, int number, size_t* bytes) { \
        return is_sound_handle(handle) ? asked_workspace(__func__, kind, a, b, c, to, number, bytes) : BAD_PARAM; \
    } \
    Status run_call(Handle* handle, const float* alpha, const Tensor* da, uint64_t a, const Tensor* db, uint64_t b, const Convolution* c, \
                    int number, uint64_t space, size_t bytes, const float* beta, const Tensor* dto, uint64_t to) { \
        return is_sound_handle(handle) ? run(__func__, kind, handle, alpha, da, a, db, b, c, number, space, bytes, beta, dto, to) : BAD_PARAM; \
    }

CALLS_OF(FORWARD, cudnnGetConvolutionForwardAlgorithm_v7, cudnnGetConvolutionForwardWorkspaceSize, cudnnConvolutionForward)
CALLS_OF(DATA, cudnnGetConvolutionBackwardDataAlgorithm_v7, cudnnGetConvolutionBackwardDataWorkspaceSize, cudnnConvolutionBackwardData)
CALLS_OF(FILTER, cudnnGetConvolutionBackwardFilterAlgorithm_v7, cudnnGetConvolutionBackwardFilterWorkspaceSize,
         cudnnConvolutionBackwardFilter)
