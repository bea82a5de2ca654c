/* A driver without a device, for tests: memory of the host stands for the device's, and kernels are emulated.
 *
 * Work is put off as long as the real driver may put it off: until somebody waits for it. So host memory that is written
 * again too early, and results that are read before they are there, show as wrong numbers. Addresses are checked, memory is
 * limited, every call that makes something is counted, and calls fail when they are told to.
 *
 * Built as a shared object whose name (SONAME) is libcuda.so. Kernels are found by their names in the folder that
 * SLABWISE_EMULATED or fake_folder() names, as `emulator::publish` leaves them there. */
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

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200, NOT_FOUND = 500,
       NOT_READY = 600, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719, CAPTURE_UNSUPPORTED = 900 };

/* ---- What tests set and look at ------------------------------------------------------------------------------------- */

static long long devices = 1, version = 13000, total = 8ll << 30, page = 2 << 20, maps_pages = 1, multiprocessors = 4,
                 capability = 90, order = 0, library = 0;
static long long live_bytes, peak_bytes, live_pinned, allocations, calls, launches, products, heuristics, replays, captures, copied_bytes;
static char folder[4096], fail_call[64], trouble[1024] = "nothing went wrong";
static long long fail_after = -1;
static Result fail_code, sticky;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

static const struct { const char* name; long long* at; } NUMBERS[] = {
    {"devices", &devices}, {"version", &version}, {"total", &total}, {"page", &page}, {"maps_pages", &maps_pages},
    {"multiprocessors", &multiprocessors}, {"capability", &capability}, {"order", &order}, {"live_bytes", &live_bytes},
    {"peak_bytes", &peak_bytes}, {"live_pinned", &live_pinned}, {"allocations", &allocations}, {"calls", &calls},
    {"library", &library}, {"launches", &launches}, {"products", &products}, {"heuristics", &heuristics}, {"replays", &replays}, {"captures", &captures}, {"copied_bytes", &copied_bytes}};

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
/* The call of this name fails with `code`, after it has succeeded `after` times; once. */
void fake_fail(const char* call, long long after, int code) {
    snprintf(fail_call, sizeof fail_call, "%s", call);
    fail_after = after;
    fail_code = code;
}

/* Kernels take time by a clock of their own: so many nanoseconds, by how their names begin; the last that fits counts. */
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

/* Enters a call: counts it, answers for a context that is lost, and fails if it was told to. */
static Result enter(const char* name) {
    ++calls;
    if (sticky) return sticky;
    if (fail_after >= 0 && !strcmp(name, fail_call) && fail_after-- == 0) {
        snprintf(trouble, sizeof trouble, "%s was told to fail", name);
        return fail_code;
    }
    return OK;
}
#define CALL \
    pthread_mutex_lock(&lock); \
    Result result = enter(__func__); \
    if (result) { pthread_mutex_unlock(&lock); return result; }
#define LEAVE(r) \
    do { Result left = (r); pthread_mutex_unlock(&lock); return left; } while (0)

/* ---- Memory --------------------------------------------------------------------------------------------------------- */

/* Addresses of the device that have memory. */
typedef struct Block { Address base; size_t bytes; struct Block* next; } Block;
static Block* blocks;

static void add_block(Address base, size_t bytes) {
    Block* b = malloc(sizeof *b);
    *b = (Block){base, bytes, blocks};
    blocks = b;
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
/* Whether all these bytes are memory of the device; they may lie in several blocks. */
int fake_inside(Address from, size_t bytes) {
    Address end = from + bytes;
    while (from < end) {
        const Block* b = blocks;
        while (b && !(b->base <= from && from < b->base + b->bytes)) b = b->next;
        if (!b) return 0;
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

/* ---- Work ----------------------------------------------------------------------------------------------------------- */

typedef struct Kernel {
    char name[200];
    const char* (*emulate)(const char*, const void*, const struct SlabwiseLaunch*);
    unsigned words;
    int shared_max;
    struct Kernel* next;
} Kernel;
typedef struct { Kernel* kernels; char* names; size_t names_bytes; } Module;
typedef struct Op Op;
typedef struct { Op *first, *last; } List;
typedef struct Stream Stream;
/* How often it was recorded as far as that was asked for, and as far as that is done. */
typedef struct { long asked, done; Stream* stream; double seconds; } Event;
/* What was asked of it and is not done yet. */
struct Stream { List* captured; List queue; Stream* next; };
struct Op {
    enum { COPY, FILL, LAUNCH, CALL_OF_LIBRARY, REPLAY, RECORD, WAIT } kind;
    int to_device, from_device, byte;
    Address to, from;
    size_t bytes;
    Kernel* kernel;
    const char* (*call)(const void*);
    char name[64];
    unsigned long long* words;
    struct SlabwiseLaunch launch;
    List* graph;
    Event* event;
    long turn;
    Op* next;
};
/* The first is the default one. A stream's work is done when it is waited for, and what it waits for just before: as late as
 * can be, and in no order with other streams but where that was asked for. */
static Stream first_stream, *streams = &first_stream;
static Stream* of(void* stream) { return stream ? stream : &first_stream; }

static void push(List* list, Op op) {
    Op* copy = malloc(sizeof op);
    *copy = op;
    copy->next = NULL;
    if (list->last) list->last->next = copy; else list->first = copy;
    list->last = copy;
}
static Result bad_address(const char* what, Address at, size_t bytes) {
    snprintf(trouble, sizeof trouble, "%s of %zu bytes at %#llx, which is no memory of the device", what, bytes, at);
    return ILLEGAL_ADDRESS;
}
static Result perform(const Op* op) {
    switch (op->kind) {
    case COPY:
        if (op->to_device && !fake_inside(op->to, op->bytes)) return bad_address("copy to", op->to, op->bytes);
        if (op->from_device && !fake_inside(op->from, op->bytes)) return bad_address("copy from", op->from, op->bytes);
        memmove((void*)op->to, (const void*)op->from, op->bytes);
        copied_bytes += (long long)op->bytes;
        return OK;
    case FILL:
        if (!fake_inside(op->to, op->bytes)) return bad_address("fill", op->to, op->bytes);
        memset((void*)op->to, op->byte, op->bytes);
        return OK;
    case LAUNCH: {
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
        for (const Op* o = op->graph->first; o; o = o->next) {
            Result r = perform(o);
            if (r) return r;
        }
        return OK;
    case RECORD:
        op->event->done = op->turn;
        op->event->seconds = clock_seconds;
        return OK;
    case WAIT: break;
    }
    return INVALID_VALUE;
}
static Op* pop(List* list) {
    Op* op = list->first;
    list->first = op->next;
    if (!list->first) list->last = NULL;
    return op;
}
/* Does a stream's work, up to a turn of an event if there is one. What goes wrong stays wrong. */
static Result drain_stream(Stream* stream, const Event* until, long turn) {
    while (stream->queue.first && !sticky && !(until && until->done >= turn)) {
        Op* op = pop(&stream->queue);
        if (op->kind == WAIT) {
            if (op->event->done < op->turn) drain_stream(op->event->stream, op->event, op->turn);
        } else
            sticky = perform(op);
        free(op->words);
        free(op);
    }
    return sticky;
}
static Result drain(void) {
    for (Stream* s = streams; s; s = s->next) drain_stream(s, NULL, 0);
    return sticky;
}
static Result submit(void* stream, Op op) {
    push(of(stream)->captured ? of(stream)->captured : &of(stream)->queue, op);
    return OK;
}

/* For libraries that work on streams: whether a call of theirs is to fail, and work of theirs, with a copy of its data. */
Result fake_enter(const char* name) {
    pthread_mutex_lock(&lock);
    heuristics += !strcmp(name, "cublasLtMatmulAlgoGetHeuristic");
    LEAVE(enter(name));
}
Result fake_submit(void* stream, const char* (*call)(const void*), const void* data, size_t bytes, const char* name) {
    CALL
    Op op = {.kind = CALL_OF_LIBRARY, .call = call, .words = malloc(bytes)};
    memcpy(op.words, data, bytes);
    snprintf(op.name, sizeof op.name, "%s", name);
    LEAVE(submit(stream, op));
}

/* ---- The driver's calls --------------------------------------------------------------------------------------------- */

Result cuInit(unsigned flags) { (void)flags; return OK; }
Result cuDriverGetVersion(int* v) { *v = (int)version; return OK; }
Result cuDeviceGetCount(int* n) { *n = (int)devices; return OK; }
Result cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal < devices ? OK : INVALID_DEVICE; }
Result cuDeviceGetName(char* name, int bytes, int device) { (void)device; snprintf(name, (size_t)bytes, "no device (emulated)"); return OK; }
Result cuDeviceTotalMem_v2(size_t* bytes, int device) { (void)device; *bytes = (size_t)total; return OK; }
Result cuDeviceGetAttribute(int* value, int which, int device) {
    (void)device;
    switch (which) {
    case 16: *value = (int)multiprocessors; break;
    case 75: *value = (int)(capability / 10); break;
    case 76: *value = (int)(capability % 10); break;
    case 97: *value = 227 << 10; break;
    case 102: *value = (int)maps_pages; break;
    default: *value = 0;
    }
    return OK;
}
static int retained;
Result cuDevicePrimaryCtxRetain(void** context, int device) {
    CALL
    ++retained;
    *context = (void*)(0x1000 + (size_t)device);
    LEAVE(OK);
}
Result cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    pthread_mutex_lock(&lock);
    /* Nobody's context any more: what was wrong with it is forgotten. */
    if (--retained == 0) {
        drain();
        sticky = OK;
        for (Stream* s = streams; s; s = s->next)
            while (s->queue.first) { Op* op = pop(&s->queue); free(op->words); free(op); }
    }
    LEAVE(OK);
}
Result cuCtxSetCurrent(void* context) { (void)context; return OK; }
Result cuMemGetInfo_v2(size_t* free_bytes, size_t* all) { CALL *all = (size_t)total; *free_bytes = (size_t)(total - live_bytes); LEAVE(OK); }
Result cuGetErrorName(Result error, const char** text) {
    switch (error) {
    case OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case ILLEGAL_ADDRESS: *text = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    case LAUNCH_FAILED: *text = "CUDA_ERROR_LAUNCH_FAILED"; break;
    case INVALID_VALUE: *text = "CUDA_ERROR_INVALID_VALUE"; break;
    case NOT_FOUND: *text = "CUDA_ERROR_NOT_FOUND"; break;
    default: *text = "CUDA_ERROR"; break;
    }
    return OK;
}
Result cuGetErrorString(Result error, const char** text) { (void)error; *text = trouble; return OK; }

Result cuMemAlloc_v2(Address* to, size_t bytes) {
    CALL
    void* memory;
    if (!bytes) LEAVE(INVALID_VALUE);
    if (!take(bytes)) LEAVE(OUT_OF_MEMORY);
    if (posix_memalign(&memory, 256, bytes)) LEAVE(OUT_OF_MEMORY);
    /* Not zero, and NaN in every type of float: nobody may count on it. */
    memset(memory, 0xFF, bytes);
    *to = (Address)memory;
    add_block(*to, bytes);
    LEAVE(OK);
}
Result cuMemFree_v2(Address at) {
    CALL
    if ((result = drain())) LEAVE(result);
    size_t bytes = remove_block(at);
    if (!bytes) LEAVE(INVALID_VALUE);
    live_bytes -= (long long)bytes;
    free((void*)at);
    LEAVE(OK);
}
Result cuMemHostAlloc(void** to, size_t bytes, unsigned flags) {
    (void)flags;
    CALL
    ++allocations;
    if (posix_memalign(to, 4096, bytes + !bytes)) LEAVE(OUT_OF_MEMORY);
    ++live_pinned;
    LEAVE(OK);
}
Result cuMemFreeHost(void* at) { CALL drain(); --live_pinned; free(at); LEAVE(OK); }

/* Addresses and memory apart. Memory is a file without a name, so that it can be behind several addresses in turn. */
typedef struct { int file; size_t bytes; } Physical;
Result cuMemGetAllocationGranularity(size_t* bytes, const void* wanted, int option) { (void)wanted; (void)option; *bytes = (size_t)page; return OK; }
Result cuMemAddressReserve(Address* to, size_t bytes, size_t align, Address hint, unsigned long long flags) {
    (void)align; (void)hint; (void)flags;
    CALL
    void* at = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED || bytes % (size_t)page) LEAVE(INVALID_VALUE);
    *to = (Address)at;
    LEAVE(OK);
}
Result cuMemAddressFree(Address at, size_t bytes) { CALL LEAVE(munmap((void*)at, bytes) ? INVALID_VALUE : OK); }
Result cuMemCreate(unsigned long long* handle, size_t bytes, const void* wanted, unsigned long long flags) {
    (void)wanted; (void)flags;
    CALL
    if (bytes % (size_t)page || !bytes) LEAVE(INVALID_VALUE);
    if (!take(bytes)) LEAVE(OUT_OF_MEMORY);
    Physical* p = malloc(sizeof *p);
    *p = (Physical){memfd_create("device", 0), bytes};
    if (p->file < 0 || ftruncate(p->file, (off_t)bytes)) LEAVE(OUT_OF_MEMORY);
    *handle = (unsigned long long)p;
    LEAVE(OK);
}
Result cuMemRelease(unsigned long long handle) {
    CALL
    Physical* p = (Physical*)handle;
    live_bytes -= (long long)p->bytes;
    close(p->file);
    free(p);
    LEAVE(OK);
}
Result cuMemMap(Address at, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags) {
    (void)flags;
    CALL
    Physical* p = (Physical*)handle;
    for (const Block* b = blocks; b; b = b->next)
        if (b->base < at + bytes && at < b->base + b->bytes) LEAVE(INVALID_VALUE);
    if (offset + bytes > p->bytes) LEAVE(INVALID_VALUE);
    void* got = mmap((void*)at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, p->file, (off_t)offset);
    if (got == MAP_FAILED) LEAVE(INVALID_VALUE);
    add_block(at, bytes);
    LEAVE(OK);
}
Result cuMemSetAccess(Address at, size_t bytes, const void* access, size_t count) { (void)at; (void)bytes; (void)access; (void)count; CALL LEAVE(OK); }
Result cuMemUnmap(Address at, size_t bytes) {
    CALL
    if ((result = drain())) LEAVE(result);
    if (remove_block(at) != bytes) LEAVE(INVALID_VALUE);
    void* got = mmap((void*)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    LEAVE(got == MAP_FAILED ? INVALID_VALUE : OK);
}

Result cuStreamCreate(void** to, unsigned flags) {
    (void)flags;
    CALL
    ++allocations;
    Stream* made = calloc(1, sizeof *made);
    made->next = streams->next;
    streams->next = made;
    *to = made;
    LEAVE(OK);
}
Result cuStreamDestroy_v2(void* stream) {
    CALL
    drain();
    Stream* before = streams;
    while (before->next && before->next != stream) before = before->next;
    if (!before->next) LEAVE(INVALID_VALUE);
    before->next = before->next->next;
    free(stream);
    LEAVE(OK);
}
Result cuStreamSynchronize(void* stream) { CALL if (of(stream)->captured) LEAVE(CAPTURE_UNSUPPORTED); LEAVE(drain_stream(of(stream), NULL, 0)); }
Result cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    (void)flags;
    CALL
    LEAVE(submit(stream, (Op){.kind = WAIT, .event = event, .turn = ((Event*)event)->asked}));
}
Result cuEventCreate(void** to, unsigned flags) { (void)flags; CALL ++allocations; *to = calloc(1, sizeof(Event)); LEAVE(OK); }
Result cuEventDestroy_v2(void* event) { CALL drain(); free(event); LEAVE(OK); }
Result cuEventRecord(void* at, void* stream) {
    CALL
    Event* event = at;
    event->stream = of(stream);
    LEAVE(submit(stream, (Op){.kind = RECORD, .event = event, .turn = ++event->asked}));
}
Result cuEventSynchronize(void* at) {
    CALL
    const Event* event = at;
    LEAVE(event->done < event->asked ? drain_stream(event->stream, event, event->asked) : OK);
}
Result cuEventQuery(void* event) { CALL LEAVE(((Event*)event)->done < ((Event*)event)->asked ? NOT_READY : OK); }
Result cuEventElapsedTime_v2(float* milliseconds, void* from, void* to) {
    CALL
    if (!((Event*)from)->done || !((Event*)to)->done) LEAVE(INVALID_VALUE);
    *milliseconds = (float)(1e3 * (((Event*)to)->seconds - ((Event*)from)->seconds));
    LEAVE(OK);
}

Result cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
    CALL
    LEAVE(submit(stream, (Op){.kind = COPY, .to_device = 1, .to = to, .from = (Address)from, .bytes = bytes}));
}
Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
    CALL
    LEAVE(submit(stream, (Op){.kind = COPY, .from_device = 1, .to = (Address)to, .from = from, .bytes = bytes}));
}
Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* stream) {
    CALL
    LEAVE(submit(stream, (Op){.kind = COPY, .to_device = 1, .from_device = 1, .to = to, .from = from, .bytes = bytes}));
}
Result cuMemsetD8Async(Address to, unsigned char byte, size_t bytes, void* stream) {
    CALL
    LEAVE(submit(stream, (Op){.kind = FILL, .to = to, .byte = byte, .bytes = bytes}));
}

/* ---- Code ----------------------------------------------------------------------------------------------------------- */

/* Keeps the names that a cubin defines. */
Result cuModuleLoadData(void** to, const void* image) {
    CALL
    ++allocations;
    const char* bytes = image;
    const Elf64_Ehdr* head = image;
    if (memcmp(head->e_ident, ELFMAG, SELFMAG) || head->e_machine != 190 /* EM_CUDA */) LEAVE(INVALID_IMAGE);
    const Elf64_Shdr* sections = (const Elf64_Shdr*)(bytes + head->e_shoff);
    Module* module = calloc(1, sizeof *module);
    for (unsigned i = 0; i < head->e_shnum; ++i) {
        if (sections[i].sh_type != SHT_SYMTAB) continue;
        const Elf64_Sym* symbols = (const Elf64_Sym*)(bytes + sections[i].sh_offset);
        const char* strings = bytes + sections[sections[i].sh_link].sh_offset;
        for (size_t s = 0; s < sections[i].sh_size / sizeof *symbols; ++s) {
            const char* name = strings + symbols[s].st_name;
            if (ELF64_ST_TYPE(symbols[s].st_info) != STT_FUNC) continue;
            module->names = realloc(module->names, module->names_bytes + strlen(name) + 1);
            strcpy(module->names + module->names_bytes, name);
            module->names_bytes += strlen(name) + 1;
        }
    }
    *to = module;
    LEAVE(OK);
}
Result cuModuleUnload(void* at) {
    CALL
    drain();
    Module* module = at;
    while (module->kernels) { Kernel* k = module->kernels; module->kernels = k->next; free(k); }
    free(module->names);
    free(module);
    LEAVE(OK);
}
Result cuModuleGetFunction(void** to, void* at, const char* name) {
    CALL
    Module* module = at;
    size_t i = 0;
    while (i < module->names_bytes && strcmp(module->names + i, name)) i += strlen(module->names + i) + 1;
    if (i >= module->names_bytes) LEAVE(NOT_FOUND);
    const char* where = *folder ? folder : getenv("SLABWISE_EMULATED");
    char path[4400] = "", object[4096] = "";
    snprintf(path, sizeof path, "%s/%s", where ? where : ".", name);
    FILE* file = fopen(path, "r");
    if (file) { object[fread(object, 1, sizeof object - 1, file)] = 0; fclose(file); }
    void* loaded = file ? dlopen(object, RTLD_NOW | RTLD_LOCAL) : NULL;
    Kernel* kernel = calloc(1, sizeof *kernel);
    unsigned (*words)(const char*) = NULL;
    if (loaded) {
        *(void**)&kernel->emulate = dlsym(loaded, "slabwise_emulate");
        *(void**)&words = dlsym(loaded, "slabwise_words");
    }
    if (!kernel->emulate || !words || !(kernel->words = words(name)) || strlen(name) >= sizeof kernel->name) {
        snprintf(trouble, sizeof trouble, "%.200s is not emulated: there is no object in %.700s", name, path);
        free(kernel);
        LEAVE(NOT_FOUND);
    }
    strcpy(kernel->name, name);
    kernel->shared_max = 48 << 10;
    kernel->next = module->kernels;
    module->kernels = kernel;
    *to = kernel;
    LEAVE(OK);
}
Result cuFuncSetAttribute(void* function, int which, int value) {
    CALL
    if (which != 8 || value > 227 << 10) LEAVE(INVALID_VALUE);
    ((Kernel*)function)->shared_max = value;
    LEAVE(OK);
}
Result cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                      void* stream, void** parameters, void** extra) {
    CALL
    Kernel* kernel = function;
    if (extra || !gx || !gy || !gz || gy > 65535 || gz > 65535 || !bx || !by || !bz || (size_t)bx * by * bz > 1024
        || (int)shared > kernel->shared_max)
        LEAVE(INVALID_VALUE);
    Op op = {.kind = LAUNCH, .kernel = kernel, .launch = {{gx, gy, gz}, {bx, by, bz}, shared, (unsigned)order, 1}};
    /* Parameters are copied before the call returns. */
    op.words = malloc(8 * kernel->words);
    memcpy(op.words, parameters[0], 8 * kernel->words);
    LEAVE(submit(stream, op));
}

/* ---- Graphs --------------------------------------------------------------------------------------------------------- */

Result cuStreamBeginCapture_v2(void* stream, int mode) {
    (void)mode;
    CALL
    if (!stream || ((Stream*)stream)->captured) LEAVE(CAPTURE_UNSUPPORTED);
    ++captures;
    ((Stream*)stream)->captured = calloc(1, sizeof(List));
    LEAVE(OK);
}
Result cuStreamEndCapture(void* stream, void** graph) { CALL *graph = ((Stream*)stream)->captured; ((Stream*)stream)->captured = NULL; LEAVE(*graph ? OK : INVALID_VALUE); }
/* The recorded work passes from the graph to what can be launched. */
Result cuGraphInstantiateWithFlags(void** to, void* graph, unsigned long long flags) {
    (void)flags;
    CALL
    ++allocations;
    List* made = malloc(sizeof *made);
    *made = *(List*)graph;
    *(List*)graph = (List){0};
    *to = made;
    LEAVE(OK);
}
static void destroy(List* list) {
    while (list->first) { Op* op = list->first; list->first = op->next; free(op->words); free(op); }
    free(list);
}
Result cuGraphDestroy(void* graph) { CALL destroy(graph); LEAVE(OK); }
Result cuGraphExecDestroy(void* graph) { CALL drain(); destroy(graph); LEAVE(OK); }
Result cuGraphLaunch(void* graph, void* stream) { CALL ++replays; LEAVE(submit(stream, (Op){.kind = REPLAY, .graph = graph})); }
