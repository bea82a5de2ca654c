// Runs the threads of a block as fibers on one host thread, block after block. A fiber is suspended
// only where CUDA threads wait for each other: at barriers and at collective operations of a warp.
// So a run is determined by the order in which fibers take turns, and a kernel that relies on one
// order is wrong in another.
#if !defined(__x86_64__) || !defined(__linux__)
#error "the emulator switches stacks by hand on x86-64 Linux only"
#endif

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "abi.h"

#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORTED __attribute__((visibility("default")))

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};
typedef unsigned long long Mask;
typedef void (*Together)(void** arguments, Mask mask);
struct SlabwiseEntry {
    const char* name;
    void (*call)(const void* words);
    unsigned words;
    char *shared_start, *shared_end;
};

extern "C" {
HIDDEN uint3 threadIdx, blockIdx;
HIDDEN dim3 blockDim, gridDim;
HIDDEN unsigned char* slabwise_dynamic_shared;
extern HIDDEN const SlabwiseEntry slabwise_entries[];
extern HIDDEN const unsigned slabwise_entry_count;
// Lanes of a wave: 32 or 64.
extern HIDDEN const unsigned slabwise_wave;
// Defined only under an address sanitizer.
void __asan_set_error_report_callback(void (*)(const char*)) __attribute__((weak));
}

namespace {

enum State : unsigned char { READY, IN_WARP, AT_BARRIER, DONE };

// An asynchronous copy in flight: its destination is NaN until it is waited for.
struct Copy {
    void* to;
    const void* from;
    int bytes;
    /// The bytes that are copied; the others become zero.
    int present;
    int group;
};

const unsigned THREADS = 1024, LANES_MIN = 32, LANES_MAX = 64, COPIES = 512;
const size_t STACK_BYTES = 64 << 10, SHARED_BYTES = 227 << 10, STATIC_BYTES = 48 << 10, PAGE = 4096;
const unsigned char POISON = 0xff;

struct Fiber {
    void* stack_pointer;
    uint3 index;
    unsigned number;
    State state;
    // The stack that it runs on; fibers that never wait run on one, one after the other.
    unsigned stack;
    int group;
    unsigned copies;
};

struct Warp {
    void* arguments[LANES_MAX];
    Together what;
    Mask mask, arrived, exists, exited;
};

Fiber fibers[THREADS];
Warp warps[THREADS / LANES_MIN];
Fiber* current;
void* scheduler;
unsigned char *stacks, *shared_end;
Copy (*copies)[COPIES];
unsigned free_stacks[THREADS], free_count;
unsigned threads, alive;
struct {
    unsigned arrived, yes;
    int kind, result;
} barrier;
const SlabwiseEntry* entry;
const void* parameter;
void* failure[5];
char* message;
const size_t MESSAGE_BYTES = 512;
bool reported;
pthread_mutex_t one_launch = PTHREAD_MUTEX_INITIALIZER;

// Switches from the running stack to another suspended one. Jumping instead of returning keeps the
// processor's return prediction consistent; all registers that the compiler may use are listed as
// clobbered.
#define SWITCH_STACKS(save, load) \
    do { \
        void** save_to = (save); \
        void* load_from = (load); \
        __asm__ volatile( \
            "pushq %%rbp\n\tpushq %%rbx\n\tleaq 1f(%%rip), %%rax\n\tpushq %%rax\n\tmovq %%rsp, (%0)\n\tmovq %1, %%rsp\n\t" \
            "popq %%rax\n\tjmpq *%%rax\n1:\tpopq %%rbx\n\tpopq %%rbp" \
            : "+D"(save_to), "+S"(load_from)::"rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc", \
              "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
              "xmm14", "xmm15"); \
    } while (0)

__attribute__((noreturn)) void fail(const char* what, const uint3& thread) {
    snprintf(message, MESSAGE_BYTES, "%s: %s, in thread (%u, %u, %u) of block (%u, %u, %u)", entry->name, what, thread.x, thread.y,
             thread.z, blockIdx.x, blockIdx.y, blockIdx.z);
    __builtin_longjmp(failure, 1);
}

void wait(State state) {
    current->state = state;
    SWITCH_STACKS(&current->stack_pointer, scheduler);
}

void fiber_main() {
    entry->call(parameter);
    wait(DONE);
    __builtin_trap();
}

void begin(Fiber& fiber) {
    fiber.stack = free_stacks[--free_count];
    // Tops of stacks at different offsets, so that they do not fall into the same cache sets.
    void** top = reinterpret_cast<void**>(stacks + (fiber.stack + 1) * STACK_BYTES - 64 - fiber.stack % 61 * 192);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(fiber_main);
    fiber.stack_pointer = top;
}

struct Random {
    uint64_t state;
    // Below n (xorshift64; Marsaglia 2003).
    unsigned below(unsigned n) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return unsigned(state >> 32) % n;
    }
};

// The order in which threads take turns.
struct Turns {
    unsigned char of[LANES_MAX];
    void arrange(unsigned count, unsigned order, Random& random) {
        for (unsigned i = 0; i < count; ++i) of[i] = order == 1 ? count - 1 - i : i;
        for (unsigned i = count; order == 2 && i > 1; --i) {
            const unsigned j = random.below(i);
            const unsigned char moved = of[i - 1];
            of[i - 1] = of[j];
            of[j] = moved;
        }
    }
};

void run_warp(unsigned first, const Turns& turns) {
    for (bool any = true; any;) {
        any = false;
        for (unsigned turn = 0; turn < slabwise_wave; ++turn) {
            const unsigned lane = turns.of[turn];
            Fiber& fiber = fibers[first + lane];
            if (first + lane >= threads || fiber.state != READY) continue;
            any = true;
            if (!fiber.stack_pointer) begin(fiber);
            current = &fiber;
            threadIdx = fiber.index;
            SWITCH_STACKS(&scheduler, fiber.stack_pointer);
            if (fiber.state != DONE) continue;
            --alive;
            free_stacks[free_count++] = fiber.stack;
            warps[first / slabwise_wave].exited |= Mask(1) << lane;
        }
    }
}

// Called when every fiber is blocked.
void open_barrier() {
    if (barrier.arrived != alive) {
        const Fiber* stuck = nullptr;
        for (unsigned i = 0; i < threads; ++i)
            if (fibers[i].state == IN_WARP || (fibers[i].state == AT_BARRIER && !stuck)) stuck = &fibers[i];
        fail(stuck->state == IN_WARP ? "waits for lanes of its warp that never come" : "waits at a barrier that not all threads reach",
             stuck->index);
    }
    const int yes = barrier.yes;
    barrier.result = barrier.kind == 1 ? yes : barrier.kind == 2 ? yes == int(alive) : yes > 0;
    barrier.arrived = barrier.yes = 0;
    for (unsigned i = 0; i < threads; ++i)
        if (fibers[i].state == AT_BARRIER) fibers[i].state = READY;
}

void run_block(unsigned order, Random& random) {
    const unsigned warp_count = (threads + slabwise_wave - 1) / slabwise_wave;
    alive = threads;
    free_count = THREADS;
    for (unsigned i = 0; i < THREADS; ++i) free_stacks[i] = THREADS - 1 - i;
    barrier.arrived = barrier.yes = 0;
    for (unsigned i = 0; i < threads; ++i) {
        fibers[i].stack_pointer = nullptr;
        fibers[i].state = READY;
        fibers[i].group = 0;
        fibers[i].copies = 0;
    }
    for (unsigned w = 0; w < warp_count; ++w) {
        const unsigned lanes = threads - w * slabwise_wave;
        warps[w].arrived = warps[w].exited = 0;
        warps[w].exists = (lanes >= slabwise_wave ? Mask(2) << (slabwise_wave - 1) : Mask(1) << lanes) - 1;
    }
    while (alive) {
        Turns warp_turns, lane_turns;
        warp_turns.arrange(warp_count, order, random);
        lane_turns.arrange(slabwise_wave, order, random);
        for (unsigned w = 0; w < warp_count; ++w) run_warp(warp_turns.of[w] * slabwise_wave, lane_turns);
        if (alive) open_barrier();
    }
}

const char* reserve() {
    if (stacks) return nullptr;
    const auto map = [](size_t bytes) {
        void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        return p == MAP_FAILED ? nullptr : static_cast<unsigned char*>(p);
    };
    const size_t shared = (SHARED_BYTES + PAGE - 1) / PAGE * PAGE;
    unsigned char* dynamic = map(shared + PAGE);
    copies = reinterpret_cast<Copy(*)[COPIES]>(map(sizeof(Copy) * COPIES * THREADS));
    unsigned char* all = map(THREADS * STACK_BYTES);
    if (!dynamic || !copies || !all) return "the host has no memory for stacks";
    // Memory after the dynamic shared memory is inaccessible.
    mprotect(dynamic + shared, PAGE, PROT_NONE);
    shared_end = dynamic + shared;
    stacks = all;
    return nullptr;
}

const char* refuse(const SlabwiseLaunch& launch, size_t static_bytes) {
    const unsigned* block = launch.block;
    const uint64_t count = uint64_t(block[0]) * block[1] * block[2];
    if (count == 0 || count > THREADS || block[2] > 64) return "a block of no or of more than 1024 threads";
    if (!launch.grid[0] || !launch.grid[1] || !launch.grid[2]) return "a grid without blocks";
    if (launch.grid[1] > 65535 || launch.grid[2] > 65535 || launch.grid[0] > 0x7fffffffu) return "a grid with too many blocks";
    if (static_bytes > STATIC_BYTES) return "more than 48 KiB of static shared memory";
    if (static_bytes + launch.shared_bytes > SHARED_BYTES) return "more than 227 KiB of shared memory";
    return reserve();
}

void run(const SlabwiseLaunch& launch) {
    // Resets the state that a failed launch left behind.
    current = nullptr;
    const size_t static_bytes = entry->shared_end - entry->shared_start;
    if (const char* why = refuse(launch, static_bytes)) {
        snprintf(message, MESSAGE_BYTES, "%s: %s", entry->name, why);
        return;
    }
    slabwise_dynamic_shared = shared_end - (launch.shared_bytes + 127) / 128 * 128;
    blockDim = {launch.block[0], launch.block[1], launch.block[2]};
    gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
    threads = 0;
    for (unsigned z = 0; z < blockDim.z; ++z)
        for (unsigned y = 0; y < blockDim.y; ++y)
            for (unsigned x = 0; x < blockDim.x; ++x, ++threads) {
                fibers[threads].index = {x, y, z};
                fibers[threads].number = threads;
            }
    if (__builtin_setjmp(failure)) return;
    Random random = {launch.seed * 0x9e3779b97f4a7c15ull | 1};
    const uint64_t blocks = uint64_t(gridDim.x) * gridDim.y * gridDim.z;
    // The order of blocks: forward, reverse, or in steps that are coprime to their number.
    uint64_t step = 1;
    if (launch.order == 2) {
        const auto divides = [](uint64_t a, uint64_t b) {
            while (b) {
                const uint64_t rest = a % b;
                a = b;
                b = rest;
            }
            return a;
        };
        step = random.below(unsigned(blocks > 1000000 ? 1000000 : blocks)) + 1;
        while (divides(step, blocks) != 1) ++step;
    }
    uint64_t at = launch.order == 1 ? blocks - 1 : 0;
    for (uint64_t done = 0; done < blocks; ++done) {
        blockIdx = {unsigned(at % gridDim.x), unsigned(at / gridDim.x % gridDim.y), unsigned(at / gridDim.x / gridDim.y)};
        memset(slabwise_dynamic_shared, POISON, launch.shared_bytes);
        if (static_bytes) memset(entry->shared_start, POISON, static_bytes);
        run_block(launch.order, random);
        at = launch.order == 1 ? at - 1 : (at + step) % blocks;
    }
}

void report(const char* text) {
    if (reported) return;
    reported = true;
    // The line after the row of signs describes the access; the stack of a fiber shows the rest.
    const char* line = strstr(text, "ERROR: ");
    if (!line) line = text;
    const char* end = strchr(line, '\n');
    snprintf(message, MESSAGE_BYTES, "%s: %.*s, in thread (%u, %u, %u) of block (%u, %u, %u)", entry->name,
             int(end ? end - line : long(strlen(line))), line, threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
}

const SlabwiseEntry* find(const char* function) {
    for (unsigned i = 0; i < slabwise_entry_count; ++i)
        if (!strcmp(slabwise_entries[i].name, function)) return &slabwise_entries[i];
    return nullptr;
}

}  // namespace

extern "C" {

HIDDEN void slabwise_fail(const char* what) { fail(what, threadIdx); }

HIDDEN unsigned slabwise_lane() { return current->number % slabwise_wave; }

HIDDEN void slabwise_together(Mask mask, Together what, void* argument) {
    Warp& warp = warps[current->number / slabwise_wave];
    const unsigned lane = current->number % slabwise_wave, first = current->number - lane;
    mask &= warp.exists;
    if (!(mask >> lane & 1)) slabwise_fail("takes part in something of its warp whose mask does not name it");
    if (mask & warp.exited) slabwise_fail("waits for a lane of its warp that has returned");
    if ((warp.arrived & mask) && (warp.what != what || warp.mask != mask)) slabwise_fail("lanes of a warp meet at different places");
    warp.what = what;
    warp.mask = mask;
    warp.arguments[lane] = argument;
    warp.arrived |= Mask(1) << lane;
    if ((warp.arrived & mask) != mask) {
        wait(IN_WARP);
        return;
    }
    warp.arrived &= ~mask;
    what(warp.arguments, mask);
    for (unsigned other = 0; other < slabwise_wave; ++other)
        if (mask >> other & 1) fibers[first + other].state = READY;
}

HIDDEN int slabwise_barrier(int kind, int predicate) {
    if (barrier.arrived && kind != barrier.kind) slabwise_fail("barriers of different kinds meet");
    barrier.kind = kind;
    barrier.yes += predicate != 0;
    ++barrier.arrived;
    wait(AT_BARRIER);
    return barrier.result;
}

HIDDEN void slabwise_copy_begin(void* to, const void* from, int bytes, int present) {
    if (current->copies == COPIES) slabwise_fail("has too many copies under way");
    memset(to, POISON, bytes);
    copies[current->number][current->copies++] = {to, from, bytes, present, current->group};
}

HIDDEN void slabwise_copy_commit() { ++current->group; }

HIDDEN void slabwise_copy_wait(int pending) {
    Copy* list = copies[current->number];
    unsigned kept = 0;
    for (unsigned i = 0; i < current->copies; ++i) {
        const Copy& copy = list[i];
        if (copy.group >= current->group - pending) {
            list[kept++] = copy;
            continue;
        }
        memcpy(copy.to, copy.from, copy.present);
        memset(static_cast<char*>(copy.to) + copy.present, 0, copy.bytes - copy.present);
    }
    current->copies = kept;
}

EXPORTED unsigned slabwise_words(const char* function) {
    const SlabwiseEntry* found = find(function);
    return found ? found->words : 0;
}

EXPORTED const char* slabwise_emulate(const char* function, const void* words, const SlabwiseLaunch* launch) {
    static __thread char text[MESSAGE_BYTES];
    const SlabwiseEntry* found = find(function);
    if (!found) {
        snprintf(text, sizeof text, "there is no function %s", function);
        return text;
    }
    pthread_mutex_lock(&one_launch);
    text[0] = 0;
    message = text;
    reported = false;
    entry = found;
    parameter = words;
    if (__asan_set_error_report_callback) __asan_set_error_report_callback(report);
    run(*launch);
    if (__asan_set_error_report_callback) __asan_set_error_report_callback(nullptr);
    pthread_mutex_unlock(&one_launch);
    return text[0] ? text : nullptr;
}
}
