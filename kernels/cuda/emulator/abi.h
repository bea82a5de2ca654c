/* The interface of a compiled emulator object (C and C++). */
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
    /* The order of turns of blocks and threads: 0 forward, 1 reverse, 2 shuffled by `seed`. */
    unsigned order;
    unsigned long long seed;
};

/* Runs `function` on host memory; `words` is its parameter. Returns NULL or an error message, which
 * is valid until the calling thread's next call. One launch of an object runs at a time; others
 * wait. */
const char* slabwise_emulate(const char* function, const void* words, const struct SlabwiseLaunch* launch);

/* The number of 64-bit words of the parameter of `function`; 0 if there is no such function. */
unsigned slabwise_words(const char* function);

#ifdef __cplusplus
}
#endif
#endif
