/* Words that processes share, for Python on processors that reorder memory accesses. As if nothing were reordered around them. */
#include <stdatomic.h>
#include <stdint.h>

uint64_t rayagi_load(const _Atomic uint64_t *word) {
    /* What was read before stays before: parameters.py reads tensors, and then whether they were being written. */
    atomic_thread_fence(memory_order_seq_cst);
    return atomic_load(word); /* what is read after stays after: what a word publishes */
}

void rayagi_store(_Atomic uint64_t *word, uint64_t value) {
    atomic_store(word, value); /* what was written before stays before: what the word publishes */
    /* What is written after stays after: parameters.py says that it writes tensors, and then does. And what is read after
       stays after: who says that it sleeps, and looks once more. */
    atomic_thread_fence(memory_order_seq_cst);
}
