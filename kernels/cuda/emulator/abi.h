/* What a compiled emulator object exports, for whoever loads it (C and C++). */
#ifndef SLABWISE_EMULATOR_ABI_H
#define SLABWISE_EMULATOR_ABI_H

#ifdef __cplusplus
extern "C" {
#endif

struct SlabwiseLaunch {
    unsigned grid[3];
    unsigned block[3];
    /* Bytes of dynamic shared memory. */
    unsigned shared_bytes;
    /* In which order blocks and threads take their turns: 0 forward, 1 reverse, 2 shuffled by `seed`. */
    unsigned order;
    unsigned long long seed;
};

/* Runs `function` on host memory; `words` is its parameter. NULL, or what went wrong, a text that is valid until the calling
 * thread's next call. One launch of an object runs at a time; others wait. */
const char* slabwise_emulate(const char* function, const void* words, const struct SlabwiseLaunch* launch);

/* How many 64-bit words the parameter of `function` has; 0 if there is no such function. */
unsigned slabwise_words(const char* function);

#ifdef __cplusplus
}
#endif
#endif
