/* A CUDA driver without a device, for tests: host memory takes the place of device memory, and
 * kernels are emulated. Memory and work are implemented in fake_work.c, which is compiled in front
 * of this.
 *
 * Built as a shared object whose name (SONAME) is libcuda.so. Kernels are looked up by name in the
 * folder that SLABWISE_EMULATED or fake_folder() names, where `emulator::publish` puts them. */

/* ---- The driver's calls ---------------------------------------------------------------------- */

Result cuInit(unsigned flags) { (void)flags; return OK; }
Result cuDriverGetVersion(int* v) { *v = (int)version; return OK; }
Result cuDeviceGetCount(int* n) { *n = (int)devices; return OK; }
Result cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal < devices ? OK : INVALID_DEVICE; }
Result cuDeviceGetName(char* name, int bytes, int device) { (void)device; snprintf(name, (size_t)bytes, "no device (emulated)"); return OK; }
Result cuDeviceTotalMem_v2(size_t* bytes, int device) { (void)device; *bytes = (size_t)total; return OK; }
Result cuDeviceGetAttribute(int* value, int which, int device) {
    (void)device;
    switch (which) {
    /* kHz, of multiprocessors and memory, which not all drivers report. */
    case 13: case 36: *value = 1000 * 1000; return clocks ? OK : INVALID_VALUE;
    case 37: *value = 1024; break; /* bits of the bus */
    case 16: *value = (int)multiprocessors; break;
    case 75: *value = (int)(capability / 10); break;
    case 76: *value = (int)(capability % 10); break;
    case 97: *value = (int)shared_bytes; break;
    case 102: *value = (int)maps_pages; break;
    default: *value = 0;
    }
    return OK;
}
Result cuDevicePrimaryCtxRetain(void** context, int device) {
    pthread_mutex_lock(&lock);
    ++calls;
    Result told = told_to_fail(__func__);
    if (told) LEAVE(told);
    ++retained;
    *context = (void*)(0x1000 + (size_t)device);
    LEAVE(OK);
}
Result cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    pthread_mutex_lock(&lock);
    /* The context is destroyed; a fatal error stays. */
    if (--retained == 0) {
        drain();
        drop_work();
    }
    LEAVE(OK);
}
/* Stands for the start of a new process, which finds no error, and nothing of what the last one
 * could not free. */
void fake_restart(void) {
    pthread_mutex_lock(&lock);
    if (sticky) {
        drop_work();
        streams = &first_stream;
        first_stream = (Stream){0};
        for (Block* b = blocks; b; b = b->next)
            if (!b->memory) free((void*)b->base);
        for (Range* r = ranges; r; r = r->next) munmap((void*)r->base, r->bytes);
        for (Physical* p = physicals; p; p = p->next) close(p->file);
        blocks = NULL;
        ranges = NULL;
        physicals = NULL;
        sticky = OK;
        retained = 0;
        live_bytes = live_ranges = live_pinned = pinned_bytes = live_modules = live_graphs = 0;
    }
    pthread_mutex_unlock(&lock);
}
Result cuCtxSetCurrent(void* context) { current = context; return OK; }
Result cuMemGetInfo_v2(size_t* free_bytes, size_t* all) { CALL *all = (size_t)total; *free_bytes = (size_t)(total - live_bytes); LEAVE(OK); }
/* The last error that it knows is 999. */
Result cuGetErrorName(Result error, const char** text) {
    *text = NULL;
    if (error > 999) return INVALID_VALUE;
    switch (error) {
    case OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case ILLEGAL_ADDRESS: *text = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    case LAUNCH_FAILED: *text = "CUDA_ERROR_LAUNCH_FAILED"; break;
    case INVALID_VALUE: *text = "CUDA_ERROR_INVALID_VALUE"; break;
    case INVALID_CONTEXT: *text = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case INVALID_HANDLE: *text = "CUDA_ERROR_INVALID_HANDLE"; break;
    case CONTEXT_IS_DESTROYED: *text = "CUDA_ERROR_CONTEXT_IS_DESTROYED"; break;
    case NOT_FOUND: *text = "CUDA_ERROR_NOT_FOUND"; break;
    case CAPTURE_UNSUPPORTED: *text = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"; break;
    case CAPTURE_INVALIDATED: *text = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"; break;
    case CAPTURE_UNJOINED: *text = "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"; break;
    case CAPTURE_ISOLATION: *text = "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"; break;
    case CAPTURED_EVENT: *text = "CUDA_ERROR_CAPTURED_EVENT"; break;
    default: *text = "CUDA_ERROR"; break;
    }
    return OK;
}
Result cuGetErrorString(Result error, const char** text) { *text = error > 999 ? NULL : trouble; return error > 999 ? INVALID_VALUE : OK; }

Result cuMemAlloc_v2(Address* to, size_t bytes) {
    CALL
    UNSAFE
    void* memory;
    if (!bytes) LEAVE(INVALID_VALUE);
    if (!take(bytes)) LEAVE(OUT_OF_MEMORY);
    if (posix_memalign(&memory, 256, bytes)) LEAVE(OUT_OF_MEMORY);
    /* Not zero, and NaN in every type of float: no caller may rely on the contents. */
    memset(memory, 0xFF, bytes);
    *to = (Address)memory;
    add_block(*to, bytes, NULL);
    LEAVE(OK);
}
Result cuMemFree_v2(Address at) {
    CALL
    UNSAFE
    if ((result = drain())) LEAVE(result);
    const Block* block = block_at(at);
    if (!block || block->memory) LEAVE(INVALID_VALUE);
    live_bytes -= (long long)remove_block(at);
    free((void*)at);
    LEAVE(OK);
}
/* Pinned host memory; its size is stored in front of it. */
enum { PINNED_HEAD = 4096 };
Result cuMemHostAlloc(void** to, size_t bytes, unsigned flags) {
    (void)flags;
    CALL
    UNSAFE
    ++allocations;
    char* memory;
    if (posix_memalign((void**)&memory, PINNED_HEAD, PINNED_HEAD + bytes + !bytes)) LEAVE(OUT_OF_MEMORY);
    memset(memory + PINNED_HEAD, 0xFF, bytes);
    *(size_t*)memory = bytes;
    *to = memory + PINNED_HEAD;
    ++live_pinned;
    pinned_bytes += (long long)bytes;
    LEAVE(OK);
}
Result cuMemFreeHost(void* at) {
    CALL
    UNSAFE
    drain();
    char* memory = (char*)at - PINNED_HEAD;
    --live_pinned;
    pinned_bytes -= (long long)*(size_t*)memory;
    free(memory);
    LEAVE(OK);
}

/* Address ranges and physical memory. */
Result cuMemGetAllocationGranularity(size_t* bytes, const void* wanted, int option) { (void)wanted; (void)option; *bytes = (size_t)page; return OK; }
Result cuMemAddressReserve(Address* to, size_t bytes, size_t align, Address hint, unsigned long long flags) {
    (void)align; (void)hint; (void)flags;
    CALL
    if (bytes % (size_t)page || !bytes) LEAVE(INVALID_VALUE);
    void* at = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) LEAVE(OUT_OF_MEMORY);
    Range* range = malloc(sizeof *range);
    *range = (Range){(Address)at, bytes, ranges};
    ranges = range;
    ++live_ranges;
    *to = range->base;
    LEAVE(OK);
}
/* A range is freed as a whole, and only while nothing is mapped to it. */
Result cuMemAddressFree(Address at, size_t bytes) {
    CALL
    Range** found = &ranges;
    while (*found && (*found)->base != at) found = &(*found)->next;
    Range* range = *found;
    if (!range || range->bytes != bytes || is_mapped(at, bytes)) LEAVE(INVALID_VALUE);
    *found = range->next;
    free(range);
    --live_ranges;
    LEAVE(munmap((void*)at, bytes) ? INVALID_VALUE : OK);
}
Result cuMemCreate(unsigned long long* handle, size_t bytes, const void* wanted, unsigned long long flags) {
    (void)wanted; (void)flags;
    CALL
    if (bytes % (size_t)page || !bytes) LEAVE(INVALID_VALUE);
    if (!take(bytes)) LEAVE(OUT_OF_MEMORY);
    Physical* p = malloc(sizeof *p);
    *p = (Physical){.file = memfd_create("device", 0), .held = 1, .bytes = bytes, .next = physicals};
    if (p->file < 0 || ftruncate(p->file, (off_t)bytes)) LEAVE(OUT_OF_MEMORY);
    physicals = p;
    *handle = (unsigned long long)p;
    LEAVE(OK);
}
Result cuMemRelease(unsigned long long handle) {
    CALL
    Physical** at = handle_of(handle);
    if (!*at || !(*at)->held) LEAVE(INVALID_VALUE);
    (*at)->held = 0;
    free_unused(at);
    LEAVE(OK);
}
Result cuMemMap(Address at, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags) {
    (void)flags;
    CALL
    Physical* p = *handle_of(handle);
    if (!p || !p->held || is_mapped(at, bytes)) LEAVE(INVALID_VALUE);
    const Range* range = ranges;
    while (range && !(range->base <= at && at + bytes <= range->base + range->bytes)) range = range->next;
    /* The real driver maps memory from its start on, and whole pages. */
    if (!range || offset != 0 || bytes > p->bytes || bytes % (size_t)page || !bytes) LEAVE(INVALID_VALUE);
    void* got = mmap((void*)at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, p->file, (off_t)offset);
    if (got == MAP_FAILED) LEAVE(INVALID_VALUE);
    add_block(at, bytes, p);
    ++p->mappings;
    LEAVE(OK);
}
/* Mapped memory is accessible only from here on. */
Result cuMemSetAccess(Address at, size_t bytes, const void* access, size_t count) {
    (void)access; (void)count;
    CALL
    size_t mapped = 0;
    for (const Block* b = blocks; b; b = b->next)
        if (at <= b->base && b->base + b->bytes <= at + bytes) mapped += b->bytes;
    if (mapped != bytes) LEAVE(INVALID_VALUE);
    for (Block* b = blocks; b; b = b->next)
        if (at <= b->base && b->base + b->bytes <= at + bytes) b->open = 1;
    LEAVE(OK);
}
/* A mapping is removed as a whole. */
Result cuMemUnmap(Address at, size_t bytes) {
    ++unmaps;
    usleep((useconds_t)unmap_us);
    CALL
    const Block* block = block_at(at);
    if (!block || !block->memory || block->bytes != bytes) LEAVE(INVALID_VALUE);
    /* The real driver does not wait either. */
    if (is_awaited(at, bytes)) {
        snprintf(trouble, sizeof trouble, "%zu bytes at %#llx are unmapped before work on them is done", bytes, at);
        LEAVE(sticky = ILLEGAL_ADDRESS);
    }
    Physical** memory = handle_of((unsigned long long)block->memory);
    --(*memory)->mappings;
    free_unused(memory);
    remove_block(at);
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
Result cuStreamSynchronize(void* stream) { CALL if (of(stream)->graph) LEAVE(spoiled(of(stream), CAPTURE_UNSUPPORTED)); LEAVE(drain_stream(of(stream), NULL)); }
/* Captured work cannot wait for uncaptured work, nor the other way round. A stream that waits for
 * an event of a capture is captured itself from there on. */
Result cuStreamWaitEvent(void* stream, void* at, unsigned flags) {
    (void)flags;
    CALL
    Stream* waits = of(stream);
    const Event* event = at;
    if (event->capture) {
        if (event->graph->capture != event->capture) LEAVE(spoiled(waits, CAPTURED_EVENT));
        if (waits->graph && waits->graph != event->graph) LEAVE(spoiled(waits, CAPTURE_MERGE));
        waits->graph = event->graph;
        add_all(&waits->front, &event->front);
        LEAVE(OK);
    }
    if (waits->graph) LEAVE(spoiled(waits, CAPTURE_ISOLATION));
    if (event->mark && !event->mark->done) LEAVE(submit(stream, (Op){.kind = WAIT, .mark = know(event->mark)}));
    LEAVE(OK);
}
Result cuEventCreate(void** to, unsigned flags) { (void)flags; CALL ++allocations; *to = calloc(1, sizeof(Event)); LEAVE(OK); }
Result cuEventDestroy_v2(void* at) {
    CALL
    drain();
    Event* event = at;
    forget(event->mark);
    clear(&event->front);
    free(event);
    LEAVE(OK);
}
Result cuEventRecord(void* at, void* stream) {
    CALL
    Event* event = at;
    Stream* records = of(stream);
    forget(event->mark);
    clear(&event->front);
    *event = (Event){0};
    if (records->graph) {
        event->capture = records->graph->capture;
        event->graph = records->graph;
        add_all(&event->front, &records->front);
        LEAVE(OK);
    }
    Mark* mark = calloc(1, sizeof *mark);
    mark->stream = records;
    event->mark = know(mark);
    LEAVE(submit(stream, (Op){.kind = RECORD, .mark = know(mark)}));
}
Result cuEventSynchronize(void* at) {
    CALL
    UNSAFE
    const Event* event = at;
    if (event->capture) LEAVE(CAPTURED_EVENT);
    LEAVE(event->mark && !event->mark->done ? drain_stream(event->mark->stream, event->mark) : OK);
}
Result cuEventQuery(void* at) {
    CALL
    UNSAFE
    const Event* event = at;
    if (event->capture) LEAVE(CAPTURED_EVENT);
    LEAVE(event->mark && !event->mark->done ? NOT_READY : OK);
}
Result cuEventElapsedTime_v2(float* milliseconds, void* from, void* to) {
    CALL
    const Mark *began = ((Event*)from)->mark, *ended = ((Event*)to)->mark;
    if (!began || !ended || !began->done || !ended->done) LEAVE(INVALID_VALUE);
    *milliseconds = (float)(1e3 * (ended->seconds - began->seconds));
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

/* ---- Code ------------------------------------------------------------------------------------ */

/* The limit of threads per block that a function was compiled for, from its attributes in the
 * cubin. */
static int threads_of(const char* at, const char* end) {
    enum { WITH_VALUE = 4, MAX_THREADS = 5 };
    while (at + 4 <= end) {
        unsigned short bytes;
        unsigned sides[3];
        memcpy(&bytes, at + 2, 2);
        if (at[0] == WITH_VALUE && at[1] == MAX_THREADS && bytes == sizeof sides && at + 4 + sizeof sides <= end) {
            memcpy(sides, at + 4, sizeof sides);
            return (int)(sides[0] * sides[1] * sides[2]);
        }
        at += at[0] == WITH_VALUE ? 4 + bytes : 4;
    }
    return 1024;
}
static Kernel* defined(Module* module, const char* name, size_t length) {
    Kernel* kernel = calloc(1, sizeof *kernel);
    if (length >= sizeof kernel->name) length = sizeof kernel->name - 1;
    memcpy(kernel->name, name, length);
    kernel->threads = 1024;
    kernel->module = module;
    kernel->next = module->kernels;
    return module->kernels = kernel;
}
/* Registers the functions that PTX defines: their names, the limit of threads per block, and the
 * arrays in shared memory. */
static Result load_ptx(Module** to, const char* text) {
    const char* target = strstr(text, ".target sm_");
    if (!target) return INVALID_IMAGE;
    if (atoi(target + 11) > capability) return NO_BINARY_FOR_GPU;
    Module* module = calloc(1, sizeof *module);
    for (const char* at = text; (at = strstr(at, ".entry "));) {
        at += 7;
        Kernel* kernel = defined(module, at, strcspn(at, "( \n"));
        const char* end = strstr(at, ".entry ");
        for (const char* line = at; line && *line && (!end || line < end); line = strchr(line, '\n'), line += !!line) {
            const char* next = strchr(line, '\n');
            const char *shared = strstr(line, ".shared"), *count = shared ? strchr(shared, '[') : NULL, *most = strstr(line, ".maxntid ");
            if (most && (!next || most < next)) kernel->threads = atoi(most + 9);
            if (count && (!next || count < next)) kernel->shared += atoi(count + 1);
        }
        kernel->shared_more = (48 << 10) - kernel->shared;
    }
    *to = module;
    return OK;
}
/* Registers the functions that a cubin defines. From sm_90 on the system uses a kilobyte of a
 * block's shared memory: the cubin counts it, but the function does not. */
Result cuModuleLoadData(void** to, const void* image) {
    CALL
    UNSAFE
    ++allocations;
    const char* bytes = image;
    const Elf64_Ehdr* head = image;
    if (memcmp(head->e_ident, ELFMAG, SELFMAG)) {
        Module* compiled = NULL;
        Result result = load_ptx(&compiled, bytes);
        live_modules += result == OK;
        *to = compiled;
        LEAVE(result);
    }
    if (head->e_machine != 190 /* EM_CUDA */) LEAVE(INVALID_IMAGE);
    const Elf64_Shdr* sections = (const Elf64_Shdr*)(bytes + head->e_shoff);
    const char* titles = bytes + sections[head->e_shstrndx].sh_offset;
    Module* module = calloc(1, sizeof *module);
    for (unsigned i = 0; i < head->e_shnum; ++i) {
        if (sections[i].sh_type != SHT_SYMTAB) continue;
        const Elf64_Sym* symbols = (const Elf64_Sym*)(bytes + sections[i].sh_offset);
        const char* strings = bytes + sections[sections[i].sh_link].sh_offset;
        for (size_t s = 0; s < sections[i].sh_size / sizeof *symbols; ++s) {
            const char* name = strings + symbols[s].st_name;
            if (ELF64_ST_TYPE(symbols[s].st_info) != STT_FUNC || strlen(name) >= sizeof module->kernels->name) continue;
            Kernel* kernel = defined(module, name, strlen(name));
            for (unsigned k = 0; k < head->e_shnum; ++k) {
                const char *title = titles + sections[k].sh_name, *data = bytes + sections[k].sh_offset;
                if (!strncmp(title, ".nv.shared.", 11) && !strcmp(title + 11, name))
                    kernel->shared = (int)sections[k].sh_size - (capability >= 90 ? 1024 : 0);
                if (!strncmp(title, ".nv.info.", 9) && !strcmp(title + 9, name))
                    kernel->threads = threads_of(data, data + sections[k].sh_size);
            }
            kernel->shared_more = (48 << 10) - kernel->shared;
        }
    }
    ++live_modules;
    *to = module;
    LEAVE(OK);
}
Result cuModuleUnload(void* at) {
    CALL
    UNSAFE
    Module* module = at;
    /* Running code is unloaded. */
    if (is_running(module)) {
        snprintf(trouble, sizeof trouble, "a module is unloaded while its functions run");
        LEAVE(sticky = LAUNCH_FAILED);
    }
    for (Kernel* k = module->kernels; k; k = k->next) k->module = NULL;
    free(module);
    --live_modules;
    LEAVE(OK);
}
Result cuModuleGetFunction(void** to, void* at, const char* name) {
    CALL
    Kernel* kernel = ((Module*)at)->kernels;
    while (kernel && strcmp(kernel->name, name)) kernel = kernel->next;
    if (!kernel) LEAVE(NOT_FOUND);
    const char* where = *folder ? folder : getenv("SLABWISE_EMULATED");
    char path[4400] = "", object[4096] = "";
    snprintf(path, sizeof path, "%s/%s", where ? where : ".", name);
    FILE* file = fopen(path, "r");
    if (file) { object[fread(object, 1, sizeof object - 1, file)] = 0; fclose(file); }
    void* loaded = file ? dlopen(object, RTLD_NOW | RTLD_LOCAL) : NULL;
    unsigned (*words)(const char*) = NULL;
    if (loaded) {
        *(void**)&kernel->emulate = dlsym(loaded, "slabwise_emulate");
        *(void**)&words = dlsym(loaded, "slabwise_words");
    }
    if (!kernel->emulate || !words || !(kernel->words = words(name))) {
        snprintf(trouble, sizeof trouble, "%.200s is not emulated: there is no object in %.700s", name, path);
        LEAVE(NOT_FOUND);
    }
    *to = kernel;
    LEAVE(OK);
}
enum { SHARED_SIZE_BYTES = 1, MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
Result cuFuncGetAttribute(int* value, int which, void* function) {
    CALL
    const Kernel* kernel = function;
    if (!kernel->module) LEAVE(INVALID_HANDLE);
    if (which != SHARED_SIZE_BYTES && which != MAX_DYNAMIC_SHARED_SIZE_BYTES) LEAVE(INVALID_VALUE);
    *value = which == SHARED_SIZE_BYTES ? kernel->shared : kernel->shared_more;
    LEAVE(OK);
}
/* Dynamic and static shared memory must fit into a block together. */
Result cuFuncSetAttribute(void* function, int which, int value) {
    CALL
    Kernel* kernel = function;
    if (!kernel->module) LEAVE(INVALID_HANDLE);
    if (which != MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 || value + kernel->shared > shared_bytes) {
        snprintf(trouble, sizeof trouble, "%s declares %d bytes of shared memory: with %d more it would have above %lld", kernel->name,
                 kernel->shared, value, shared_bytes);
        LEAVE(INVALID_VALUE);
    }
    kernel->shared_more = value;
    LEAVE(OK);
}
Result cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                      void* stream, void** parameters, void** extra) {
    CALL
    Kernel* kernel = function;
    if (!kernel->module) LEAVE(INVALID_HANDLE);
    if (extra || !gx || !gy || !gz || gx > 0x7fffffff || gy > 65535 || gz > 65535 || !bx || !by || !bz || bz > 64
        || (size_t)bx * by * bz > (size_t)kernel->threads || (long long)shared > kernel->shared_more) {
        snprintf(trouble, sizeof trouble, "%s: %u × %u × %u blocks of %u × %u × %u threads with %u bytes, of at most %d threads with %d",
                 kernel->name, gx, gy, gz, bx, by, bz, shared, kernel->threads, kernel->shared_more);
        LEAVE(INVALID_VALUE);
    }
    Op op = {.kind = LAUNCH, .kernel = kernel, .launch = {{gx, gy, gz}, {bx, by, bz}, shared, (unsigned)order, 1}};
    /* Parameters are copied before the call returns. */
    op.words = malloc(8 * kernel->words);
    memcpy(op.words, parameters[0], 8 * kernel->words);
    LEAVE(submit(stream, op));
}

/* ---- Graphs ---------------------------------------------------------------------------------- */

static void destroy(Graph* graph) {
    for (size_t i = 0; i < graph->count; ++i) {
        drop(&graph->pieces[i].op);
        clear(&graph->pieces[i].waits);
    }
    free(graph->pieces);
    graph->pieces = NULL;
    graph->count = 0;
}
Result cuStreamBeginCapture_v2(void* at, int mode) {
    CALL
    Stream* stream = at;
    if (!stream || stream->graph) LEAVE(CAPTURE_UNSUPPORTED);
    ++captures;
    stream->graph = calloc(1, sizeof(Graph));
    stream->early = 0;
    stream->graph->capture = ++recordings;
    stream->graph->origin = stream;
    /* If it is set to be strict, it treats relaxed mode as thread-local. */
    stream->graph->mode = strict ? THREAD_LOCAL : mode;
    stream->graph->thread = pthread_self();
    LEAVE(OK);
}
/* All captured work must be joined to the front of the first stream. The capture ends even if the
 * call fails. */
Result cuStreamEndCapture(void* at, void** to) {
    pthread_mutex_lock(&lock);
    Result told = enter(__func__);
    Stream* stream = at;
    Graph* graph = stream->graph;
    *to = NULL;
    if (!graph || graph->origin != stream) LEAVE(told ? told : CAPTURE_UNMATCHED);
    graph->spoiled |= told != OK;
    for (size_t i = 0; i < stream->front.count; ++i) graph->pieces[stream->front.at[i]].done = 1;
    int joined = 1;
    /* The dependencies of a piece were captured before it. */
    for (size_t i = graph->count; i-- > 0;) {
        /* Nodes removed from the front explicitly need not be joined. */
        joined &= graph->pieces[i].done || graph->by_hand;
        for (size_t k = 0; k < graph->pieces[i].waits.count; ++k) graph->pieces[graph->pieces[i].waits.at[k]].done = 1;
    }
    graph->capture = 0;
    for (Stream* s = streams; s; s = s->next)
        if (s->graph == graph) {
            s->graph = NULL;
            clear(&s->front);
        }
    if (graph->spoiled) {
        destroy(graph);
        LEAVE(told ? told : CAPTURE_INVALIDATED);
    }
    if (!joined) {
        snprintf(trouble, sizeof trouble, "what another stream was given is not waited for");
        destroy(graph);
        LEAVE(CAPTURE_UNJOINED);
    }
    *to = graph;
    LEAVE(OK);
}
/* Nodes are their numbers, from 1. Without a valid capture the call succeeds, and only its status
 * says so: also if it is set to find the capture invalidated. */
typedef struct { unsigned char from_port, to_port, type, reserved[5]; } Edge;
Result cuStreamGetCaptureInfo_v3(void* at, int* status, unsigned long long* id, void** graph, void* const** nodes, const Edge** edges,
                                 size_t* count) {
    (void)id;
    (void)graph;
    static void* front[4096];
    static Edge whole[4096];
    const Stream* stream = of(at);
    pthread_mutex_lock(&lock);
    Result told = enter(__func__);
    if (told == CAPTURE_INVALIDATED && stream->graph) {
        stream->graph->spoiled = 1;
        told = OK;
    }
    if (told) LEAVE(told);
    *status = stream->graph ? stream->graph->spoiled ? 2 : 1 : 0;
    if (*status != 1) LEAVE(OK);
    if (stream->front.count > 4096) LEAVE(INVALID_VALUE);
    /* A caller that does not ask for the edges would lose what they say. */
    if (!edges && stream->early) LEAVE(LOSSY_QUERY);
    for (size_t i = 0; i < stream->front.count; ++i) front[i] = (void*)(stream->front.at[i] + 1);
    *nodes = front;
    if (edges) *edges = whole;
    *count = stream->front.count;
    LEAVE(OK);
}
Result cuGraphNodeGetType(void* node, int* type) {
    CALL
    const Graph* graph = NULL;
    for (const Stream* s = streams; s && !graph; s = s->next) graph = s->graph;
    size_t at = (size_t)node - 1;
    if (!graph || at >= graph->count) LEAVE(INVALID_VALUE);
    const int kind = graph->pieces[at].op.kind;
    *type = kind == LAUNCH || kind == CALL_OF_LIBRARY ? 0 : kind == COPY ? 1 : kind == FILL ? 2 : 5;
    LEAVE(OK);
}
/* A programmatic edge may only lead from one kernel to another, on devices that launch kernels
 * early. A driver of `ends` refuses such edges, and one of `chains` all. */
Result cuStreamUpdateCaptureDependencies_v2(void* at, void** nodes, const Edge* edges, size_t count, unsigned flags) {
    CALL
    Stream* stream = of(at);
    Graph* graph = stream->graph;
    if (!graph || flags > 1 || chains) LEAVE(INVALID_VALUE);
    int any_early = 0;
    for (size_t i = 0; i < count; ++i) {
        size_t node = (size_t)nodes[i] - 1;
        if (node >= graph->count) LEAVE(INVALID_VALUE);
        const int kind = graph->pieces[node].op.kind;
        const int early = edges && edges[i].type;
        if (early && (ends || capability < 90 || edges[i].from_port != 1 || (kind != LAUNCH && kind != CALL_OF_LIBRARY))) LEAVE(INVALID_VALUE);
        any_early |= early;
    }
    if (flags == 1) {
        clear(&stream->front);
        stream->early = 0;
    }
    stream->early |= any_early;
    for (size_t i = 0; i < count; ++i) add(&stream->front, (size_t)nodes[i] - 1);
    graph->by_hand = 1;
    LEAVE(OK);
}
/* Moves the captured work from the graph to the executable one. The empty graph stays, because
 * events refer to it. */
Result cuGraphInstantiateWithFlags(void** to, void* at, unsigned long long flags) {
    (void)flags;
    CALL
    ++allocations;
    if (live_graphs >= graph_room) LEAVE(OUT_OF_MEMORY);
    ++live_graphs;
    Graph *made = malloc(sizeof *made), *graph = at;
    *made = *graph;
    graph->pieces = NULL;
    graph->count = 0;
    *to = made;
    LEAVE(OK);
}
/* Uploads follow the stream's work; a stream that is being captured takes none. */
Result cuGraphUpload(void* graph, void* stream) {
    CALL
    (void)graph;
    ++uploads;
    LEAVE(of(stream)->graph ? CAPTURE_UNSUPPORTED : OK);
}
Result cuGraphDestroy(void* graph) { CALL destroy(graph); LEAVE(OK); }
Result cuGraphExecDestroy(void* graph) { CALL drain(); --live_graphs; destroy(graph); free(graph); LEAVE(OK); }
Result cuGraphLaunch(void* graph, void* stream) {
    CALL
    const Graph* launched = graph;
    for (size_t i = 0; i < launched->count; ++i)
        if (launched->pieces[i].op.kind == LAUNCH && !launched->pieces[i].op.kernel->module) LEAVE(INVALID_HANDLE);
    ++replays;
    LEAVE(submit(stream, (Op){.kind = REPLAY, .graph = graph, .after_idle = is_idle(of(stream))}));
}
