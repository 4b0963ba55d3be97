/* Sequentially consistent 64-bit loads and stores with full fences, for Python on processors that reorder memory accesses. */
#include <stdatomic.h>
#include <stdint.h>

uint64_t rayagi_load(const _Atomic uint64_t *word) {
    /* Fence: earlier reads stay before the load. A reader of parameters copies tensors, then loads whether they were being
       written meanwhile. */
    atomic_thread_fence(memory_order_seq_cst);
    return atomic_load(word); /* acquire: later reads see what the word publishes */
}

void rayagi_store(_Atomic uint64_t *word, uint64_t value) {
    atomic_store(word, value); /* release: publishes earlier writes */
    /* Fence: later accesses stay after the store. A writer of parameters marks tensors as being written, then writes them.
       A member announces that it sleeps, then checks once more whether it must. */
    atomic_thread_fence(memory_order_seq_cst);
}
