/* The implementation of fake_libcuda.c, compiled in front of it: settings and counters, memory,
 * work and its dependencies.
 *
 * Work is delayed as long as the real driver may delay it: until a caller waits for it. Therefore
 * host memory that is overwritten too early, and results that are read too early, show as wrong
 * numbers. If `eager` is set, streams that launch no kernels run ahead of those that do, as far as
 * events allow, so that copies that start too early show too. Captured graphs keep their
 * dependencies, and are replayed in the same two ways. Addresses are checked, memory is limited,
 * every call that creates something is counted, and calls fail when they are set to. Errors of the
 * real driver are returned: for calls without a context, calls that invalidate a capture, launches
 * beyond a function's limits, functions of unloaded code. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "abi.h"

typedef int Result;
typedef unsigned long long Address;

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201,
       NO_BINARY_FOR_GPU = 209,
       INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, CONTEXT_IS_DESTROYED = 709,
       LAUNCH_FAILED = 719, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_MERGE = 902,
       CAPTURE_UNMATCHED = 903, CAPTURE_UNJOINED = 904, CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907,
       LOSSY_QUERY = 917 };

/* ---- Settings and counters for tests --------------------------------------------------------- */

static long long devices = 1, version = 13000, total = 8ll << 30, page = 2 << 20, maps_pages = 1, multiprocessors = 4,
                 capability = 90, shared_bytes = 227 << 10, order = 0, eager = 0, library = 0, cudnn = 0, strict = 0, idle = 0, clocks = 1, chains = 0, ends = 0, graph_room = 1 << 20,
                 unmap_us = 0;
static long long live_bytes, peak_bytes, live_ranges, live_pinned, pinned_bytes, live_modules, live_graphs, without_context, allocations, calls, launches, products,
                 heuristics, checks, replays, uploads, captures, forked, copied_bytes, unmaps;
static char folder[4096], fail_call[64], trouble[1024] = "nothing went wrong";
static long long fail_after = -1;
static Result fail_code, sticky;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

static const struct { const char* name; long long* at; } NUMBERS[] = {
    {"devices", &devices}, {"version", &version}, {"total", &total}, {"page", &page}, {"maps_pages", &maps_pages},
    {"multiprocessors", &multiprocessors}, {"capability", &capability}, {"shared_bytes", &shared_bytes}, {"strict", &strict},
    {"order", &order}, {"eager", &eager}, {"idle", &idle}, {"clocks", &clocks}, {"chains", &chains}, {"ends", &ends}, {"graph_room", &graph_room}, {"live_graphs", &live_graphs},
    {"library", &library}, {"cudnn", &cudnn}, {"products", &products}, {"heuristics", &heuristics}, {"checks", &checks},
    {"live_bytes", &live_bytes}, {"peak_bytes", &peak_bytes}, {"live_ranges", &live_ranges}, {"live_pinned", &live_pinned}, {"pinned_bytes", &pinned_bytes},
    {"live_modules", &live_modules},
    {"without_context", &without_context}, {"allocations", &allocations}, {"calls", &calls}, {"launches", &launches}, {"replays", &replays}, {"uploads", &uploads}, {"captures", &captures},
    {"forked", &forked}, {"copied_bytes", &copied_bytes}, {"unmap_us", &unmap_us}, {"unmaps", &unmaps}};

static long long* number(const char* name) {
    for (size_t i = 0; i < sizeof NUMBERS / sizeof *NUMBERS; ++i)
        if (!strcmp(NUMBERS[i].name, name)) return NUMBERS[i].at;
    return NULL;
}
int fake_set(const char* name, long long value) {
    long long* at = number(name);
    if (at) *at = value;
    return at != NULL;
}
long long fake_get(const char* name) {
    const long long* at = number(name);
    return at ? *at : -1;
}
void fake_folder(const char* path) { snprintf(folder, sizeof folder, "%s", path); }
/* Makes the call of this name fail once with `code`, after it has succeeded `after` times. */
void fake_fail(const char* call, long long after, int code) {
    snprintf(fail_call, sizeof fail_call, "%s", call);
    fail_after = after;
    fail_code = code;
}

/* The simulated time of kernels: nanoseconds by the beginning of their names; the last match
 * counts. The setting `idle` is the time for which a graph's launch leaves an idle stream without
 * work. */
static struct { char begins[64]; long long nanoseconds; } costs[64];
static size_t costs_count;
static double clock_seconds;
void fake_cost(const char* begins, long long nanoseconds) {
    if (!*begins) costs_count = 0;
    if (costs_count == sizeof costs / sizeof *costs) return;
    snprintf(costs[costs_count].begins, sizeof costs->begins, "%s", begins);
    costs[costs_count++].nanoseconds = nanoseconds;
}
static void pass(const char* name) {
    long long cost = 1000;
    for (size_t i = 0; i < costs_count; ++i)
        if (!strncmp(name, costs[i].begins, strlen(costs[i].begins))) cost = costs[i].nanoseconds;
    clock_seconds += 1e-9 * (double)cost;
}

/* After these errors, the process can use the device no further. */
static int is_fatal(Result error) {
    switch (error) {
    case 214: case 220: case 226: case 700: case 702: case 709: case 710: case 714: case 715: case 716: case 717: case 718: case 719:
    case 721: case 810: case 911: case 999: return 1;
    default: return 0;
    }
}
static Result told_to_fail(const char* name) {
    if (fail_after < 0 || strcmp(name, fail_call) || fail_after-- != 0) return OK;
    snprintf(trouble, sizeof trouble, "%s was told to fail", name);
    if (is_fatal(fail_code)) sticky = fail_code;
    return fail_code;
}
/* How often the primary context is retained, and the calling thread's context. */
static int retained;
static __thread void* current;
/* Enters a call: counts it, and fails if the context is missing or lost or the call is set to fail.
 * */
static Result enter(const char* name) {
    ++calls;
    if (!current || !retained) {
        ++without_context;
        snprintf(trouble, sizeof trouble, "%s by a thread that has no context", name);
        return current ? CONTEXT_IS_DESTROYED : INVALID_CONTEXT;
    }
    return sticky ? sticky : told_to_fail(name);
}
#define CALL \
    pthread_mutex_lock(&lock); \
    Result result = enter(__func__); \
    if (result) { pthread_mutex_unlock(&lock); return result; }
#define LEAVE(r) \
    do { Result left = (r); pthread_mutex_unlock(&lock); return left; } while (0)

/* ---- Memory ---------------------------------------------------------------------------------- */

/* Physical memory, which exists until its handle is released and it is mapped nowhere. It is an
 * unnamed file, so that it can be mapped to several addresses in turn. */
typedef struct Physical { int file, held, mappings; size_t bytes; struct Physical* next; } Physical;
static Physical* physicals;
/* Addresses of the device that have memory, the physical memory that is mapped there if it is not
 * the driver's own, and whether the device may access it. */
typedef struct Block { Address base; size_t bytes; Physical* memory; int open; struct Block* next; } Block;
static Block* blocks;
/* Reserved addresses. */
typedef struct Range { Address base; size_t bytes; struct Range* next; } Range;
static Range* ranges;

static void add_block(Address base, size_t bytes, Physical* memory) {
    Block* b = malloc(sizeof *b);
    *b = (Block){base, bytes, memory, !memory, blocks};
    blocks = b;
}
static const Block* block_at(Address base) {
    const Block* b = blocks;
    while (b && b->base != base) b = b->next;
    return b;
}
/* The pointer to the memory of this handle; to null if there is none. */
static Physical** handle_of(unsigned long long handle) {
    Physical** at = &physicals;
    while (*at && (unsigned long long)*at != handle) at = &(*at)->next;
    return at;
}
static void free_unused(Physical** at) {
    Physical* p = *at;
    if (p->held || p->mappings) return;
    live_bytes -= (long long)p->bytes;
    close(p->file);
    *at = p->next;
    free(p);
}
static int is_mapped(Address at, size_t bytes) {
    for (const Block* b = blocks; b; b = b->next)
        if (b->base < at + bytes && at < b->base + b->bytes) return 1;
    return 0;
}
static size_t remove_block(Address base) {
    for (Block** at = &blocks; *at; at = &(*at)->next)
        if ((*at)->base == base) {
            Block* found = *at;
            size_t bytes = found->bytes;
            *at = found->next;
            free(found);
            return bytes;
        }
    return 0;
}
/* Whether all these bytes are memory that the device may access; they may lie in several blocks. */
int fake_inside(Address from, size_t bytes) {
    Address end = from + bytes;
    while (from < end) {
        const Block* b = blocks;
        while (b && !(b->base <= from && from < b->base + b->bytes)) b = b->next;
        if (!b || !b->open) return 0;
        from = b->base + b->bytes;
    }
    return 1;
}
static int take(size_t bytes) {
    ++allocations;
    if (live_bytes + (long long)bytes > total) return 0;
    live_bytes += (long long)bytes;
    if (live_bytes > peak_bytes) peak_bytes = live_bytes;
    return 1;
}

/* ---- Work ------------------------------------------------------------------------------------ */

/* A function of a module: its static shared memory, the limit of dynamic shared memory, the limit
 * of threads per block. It outlives its module, so that later uses are detected. */
typedef struct Module Module;
typedef struct Kernel {
    char name[200];
    const char* (*emulate)(const char*, const void*, const struct SlabwiseLaunch*);
    unsigned words;
    int shared, shared_more, threads;
    Module* module;
    struct Kernel* next;
} Kernel;
struct Module { Kernel* kernels; };
typedef struct Stream Stream;
/* A point in a stream's work, referenced by the event that was recorded there last and by its
 * waiters. */
typedef struct { int known, done; Stream* stream; double seconds; } Mark;
typedef struct Graph Graph;
typedef struct Op {
    enum { COPY, FILL, LAUNCH, CALL_OF_LIBRARY, REPLAY, RECORD, WAIT } kind;
    int to_device, from_device, byte, after_idle;
    Address to, from;
    size_t bytes;
    Kernel* kernel;
    const char* (*call)(const void*);
    char name[64];
    unsigned long long* words;
    struct SlabwiseLaunch launch;
    Graph* graph;
    Mark* mark;
    struct Op* next;
} Op;
typedef struct { Op *first, *last; } List;
/* Pieces of a graph that the next piece depends on. */
typedef struct { size_t* at; size_t count; } Front;
/* Captured work. `capture` numbers the capture, 0 once it has ended; `mode` says which calls of
 * which threads invalidate it, and `thread` is the thread that began it. `forked` pieces are
 * ordered only by their waits: those of another stream, or captured with explicit edges. */
typedef struct { Op op; Front waits; int forked, done; } Piece;
enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
struct Graph { Piece* pieces; size_t count; long capture; Stream* origin; int mode, spoiled, by_hand; pthread_t thread; };
/* The last point at which it was recorded, or the pieces of a graph that precede that point. */
typedef struct { Mark* mark; long capture; Graph* graph; Front front; } Event;
/* The submitted work that is not done yet; or the graph that captures the stream, the front, and
 * whether one of the edges from there is programmatic. */
struct Stream { List queue; int launches; Graph* graph; Front front; int early; Stream* next; };
/* The first is the default stream. A stream's work is done when a caller waits for it, and its
 * dependencies just before: as late as possible, and unordered with other streams except by events.
 * */
static Stream first_stream, *streams = &first_stream;
static long recordings;
static Stream* of(void* stream) { return stream ? stream : &first_stream; }

static Mark* know(Mark* mark) {
    if (mark) ++mark->known;
    return mark;
}
static void forget(Mark* mark) {
    if (mark && --mark->known == 0) free(mark);
}
static void drop(Op* op) {
    free(op->words);
    forget(op->mark);
}
static void add(Front* front, size_t piece) {
    for (size_t i = 0; i < front->count; ++i)
        if (front->at[i] == piece) return;
    front->at = realloc(front->at, (front->count + 1) * sizeof *front->at);
    front->at[front->count++] = piece;
}
static void add_all(Front* front, const Front* more) {
    for (size_t i = 0; i < more->count; ++i) add(front, more->at[i]);
}
static void clear(Front* front) {
    free(front->at);
    *front = (Front){0};
}
static Result bad_address(const char* what, Address at, size_t bytes) {
    snprintf(trouble, sizeof trouble, "%s of %zu bytes at %#llx, which is no memory of the device", what, bytes, at);
    return ILLEGAL_ADDRESS;
}
static Result gone(const Kernel* kernel) {
    snprintf(trouble, sizeof trouble, "%s runs, and its module is unloaded", kernel->name);
    return LAUNCH_FAILED;
}
static Result replay(Graph* graph);
static Result perform(const Op* op) {
    switch (op->kind) {
    case COPY: {
        Result told = told_to_fail("copy");
        if (told) return told;
        if (op->to_device && !fake_inside(op->to, op->bytes)) return bad_address("copy to", op->to, op->bytes);
        if (op->from_device && !fake_inside(op->from, op->bytes)) return bad_address("copy from", op->from, op->bytes);
        memmove((void*)op->to, (const void*)op->from, op->bytes);
        copied_bytes += (long long)op->bytes;
        return OK;
    }
    case FILL:
        if (!fake_inside(op->to, op->bytes)) return bad_address("fill", op->to, op->bytes);
        memset((void*)op->to, op->byte, op->bytes);
        return OK;
    case LAUNCH: {
        if (!op->kernel->module) return gone(op->kernel);
        ++launches;
        pass(op->kernel->name);
        const char* wrong = op->kernel->emulate(op->kernel->name, op->words, &op->launch);
        if (wrong) snprintf(trouble, sizeof trouble, "%s: %s", op->kernel->name, wrong);
        return wrong ? LAUNCH_FAILED : OK;
    }
    case CALL_OF_LIBRARY: {
        ++products;
        pass(op->name);
        const char* wrong = op->call(op->words);
        if (wrong) snprintf(trouble, sizeof trouble, "%s: %s", op->name, wrong);
        return wrong ? ILLEGAL_ADDRESS : OK;
    }
    case REPLAY:
        clock_seconds += 1e-9 * (double)(op->after_idle ? idle : 0);
        return replay(op->graph);
    case RECORD:
        op->mark->done = 1;
        op->mark->seconds = clock_seconds;
        return OK;
    case WAIT: break;
    }
    return INVALID_VALUE;
}
static int ready(const Graph* graph, const Piece* piece) {
    int all = 1;
    for (size_t i = 0; i < piece->waits.count; ++i) all &= graph->pieces[piece->waits.at[i]].done;
    return all;
}
/* Executes a piece, and its dependencies before it. */
static Result do_piece(Graph* graph, size_t at) {
    Piece* piece = &graph->pieces[at];
    Result r = OK;
    for (size_t i = 0; i < piece->waits.count && !r; ++i) r = do_piece(graph, piece->waits.at[i]);
    if (r || piece->done) return r;
    piece->done = 1;
    return perform(&piece->op);
}
/* Work of forked streams is done when a piece waits for it, or, if eager, as soon as possible. With
 * explicit edges only these order the work: the piece captured last is done first, after its
 * dependencies. */
static Result replay(Graph* graph) {
    Result r = OK;
    for (size_t i = 0; i < graph->count; ++i) graph->pieces[i].done = 0;
    for (size_t i = graph->count; graph->by_hand && !eager && !r && i-- > 0;) r = do_piece(graph, i);
    for (size_t i = 0; i < graph->count && !r; ++i) {
        for (size_t k = 0; eager && k < graph->count && !r; ++k)
            if (graph->pieces[k].forked && ready(graph, &graph->pieces[k])) r = do_piece(graph, k);
        if (!r && !graph->pieces[i].forked) r = do_piece(graph, i);
    }
    for (size_t i = 0; i < graph->count && !r; ++i) r = do_piece(graph, i);
    return r;
}
static void push(List* list, Op op) {
    Op* copy = malloc(sizeof op);
    *copy = op;
    copy->next = NULL;
    if (list->last) list->last->next = copy; else list->first = copy;
    list->last = copy;
}
static Op* pop(List* list) {
    Op* op = list->first;
    list->first = op->next;
    if (!list->first) list->last = NULL;
    return op;
}
/* Executes a stream's work, up to a mark if there is one. Errors are sticky. */
static Result drain_stream(Stream* stream, const Mark* until) {
    while (stream->queue.first && !sticky && !(until && until->done)) {
        Op* op = pop(&stream->queue);
        if (op->kind == WAIT) {
            if (!op->mark->done) drain_stream(op->mark->stream, op->mark);
        } else
            sticky = perform(op);
        drop(op);
        free(op);
    }
    return sticky;
}
static Result drain(void) {
    for (Stream* s = streams; s; s = s->next) drain_stream(s, NULL);
    return sticky;
}
static void drop_work(void) {
    for (Stream* s = streams; s; s = s->next)
        while (s->queue.first) { Op* op = pop(&s->queue); drop(op); free(op); }
}
/* Whether a stream has nothing to do. */
static int is_idle(const Stream* stream) {
    const Op* op = stream->queue.first;
    while (op && (op->kind == RECORD || op->kind == WAIT)) op = op->next;
    return !op;
}
/* Streams without kernels run until a wait whose work is not done. */
static void run_ahead(void) {
    for (Stream* s = streams; s && eager; s = s->next)
        while (!s->launches && s->queue.first && !sticky && !(s->queue.first->kind == WAIT && !s->queue.first->mark->done)) {
            Op* op = pop(&s->queue);
            if (op->kind != WAIT) sticky = perform(op);
            drop(op);
            free(op);
        }
}
static Result submit(void* to, Op op) {
    Stream* stream = of(to);
    stream->launches |= op.kind == LAUNCH || op.kind == CALL_OF_LIBRARY || op.kind == REPLAY;
    Graph* graph = stream->graph;
    if (graph && graph->spoiled) return CAPTURE_INVALIDATED;
    /* The target of a programmatic edge is a kernel; those of libraries do not wait for others. */
    if (graph && stream->early && op.kind != LAUNCH) {
        snprintf(trouble, sizeof trouble, "the target of a programmatic edge is no kernel that waits");
        graph->spoiled = 1;
        return INVALID_VALUE;
    }
    stream->early = 0;
    if (graph) {
        int is_forked = stream != graph->origin;
        forked += is_forked;
        graph->pieces = realloc(graph->pieces, (graph->count + 1) * sizeof *graph->pieces);
        graph->pieces[graph->count] = (Piece){op, stream->front, is_forked, 0};
        stream->front = (Front){0};
        add(&stream->front, graph->count++);
        return OK;
    }
    push(&stream->queue, op);
    run_ahead();
    return OK;
}
/* Whether pending work uses an address of this region. */
static int names(const Op* op, Address at, size_t bytes) {
    if (op->kind == COPY || op->kind == FILL) {
        int from = op->kind == COPY && op->from < at + bytes && at < op->from + op->bytes;
        return from || (op->to < at + bytes && at < op->to + op->bytes);
    }
    for (unsigned w = 0; op->kind == LAUNCH && w < op->kernel->words; ++w)
        if (at <= op->words[w] && op->words[w] < at + bytes) return 1;
    for (size_t w = 0; op->kind == CALL_OF_LIBRARY && w < op->bytes / 8; ++w)
        if (at <= op->words[w] && op->words[w] < at + bytes) return 1;
    for (size_t i = 0; op->kind == REPLAY && i < op->graph->count; ++i)
        if (names(&op->graph->pieces[i].op, at, bytes)) return 1;
    return 0;
}
static int is_awaited(Address at, size_t bytes) {
    for (const Stream* s = streams; s; s = s->next)
        for (const Op* op = s->queue.first; op; op = op->next)
            if (names(op, at, bytes)) return 1;
    return 0;
}
/* Whether pending work runs a module's code. */
static int runs(const Op* op, const Module* module) {
    int any = op->kind == LAUNCH && op->kernel->module == module;
    for (size_t i = 0; op->kind == REPLAY && i < op->graph->count; ++i) any |= runs(&op->graph->pieces[i].op, module);
    return any;
}
static int is_running(const Module* module) {
    for (const Stream* s = streams; s; s = s->next)
        for (const Op* op = s->queue.first; op; op = op->next)
            if (runs(op, module)) return 1;
    return 0;
}
/* A call that may allocate memory, load code or wait invalidates captures in the stricter modes:
 * those of any thread, or those of this one. */
static int spoils(const char* name) {
    int any = 0;
    for (const Stream* s = streams; s; s = s->next) {
        Graph* g = s->graph;
        if (!g || g->mode == RELAXED || (g->mode == THREAD_LOCAL && !pthread_equal(g->thread, pthread_self()))) continue;
        any = g->spoiled = 1;
        snprintf(trouble, sizeof trouble, "%s while work is recorded in mode %d", name, g->mode);
    }
    return any;
}
/* An invalid use of a captured stream invalidates the capture. */
static Result spoiled(Stream* stream, Result why) {
    if (stream->graph) stream->graph->spoiled = 1;
    return why;
}
#define UNSAFE if (spoils(__func__)) LEAVE(CAPTURE_UNSUPPORTED);

/* For libraries that work on streams: whether their call is set to fail, whether a stream exists,
 * whether the call is forbidden during a capture, and submission of their work, with a copy of its data. */
Result fake_enter(const char* name) {
    pthread_mutex_lock(&lock);
    heuristics += !strcmp(name, "cublasLtMatmulAlgoGetHeuristic");
    checks += !strcmp(name, "cublasLtMatmulAlgoCheck");
    LEAVE(enter(name));
}
int fake_lives(const void* stream) {
    pthread_mutex_lock(&lock);
    const Stream* s = streams;
    while (s && s != stream) s = s->next;
    pthread_mutex_unlock(&lock);
    return s != NULL;
}
Result fake_unsafe(const char* name) {
    CALL
    LEAVE(spoils(name) ? CAPTURE_UNSUPPORTED : OK);
}
Result fake_submit(void* stream, const char* (*call)(const void*), const void* data, size_t bytes, const char* name) {
    CALL
    Op op = {.kind = CALL_OF_LIBRARY, .call = call, .bytes = bytes, .words = malloc(bytes)};
    memcpy(op.words, data, bytes);
    snprintf(op.name, sizeof op.name, "%s", name);
    LEAVE(submit(stream, op));
}

