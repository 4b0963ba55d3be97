/* Threads that share one program: thread 0 posts jobs, the others take items until shutdown. */
#include <sched.h>
#include <stdint.h>
#include <time.h>

typedef void Job(void *given, int64_t item);

typedef struct {
    int64_t threads; /* who asks is the first of them */
    int64_t *claimed;  /* (threads, LINE): of each thread's items, how many are claimed */
    Job *job;
    void *given;
    int64_t items;
    int64_t posted; /* jobs */
    int64_t accepting;   /* whether the last one may be entered */
    int64_t active; /* helpers */
    int64_t shutdown;   /* whether nothing more comes */
} ThreadPool;

enum { LINE = 8, SPINS = 2000, YIELDS = 500, NAP_NS = 50000 };

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE()
#endif

/* After so many attempts in vain: some 100 us of them, then as many of offers of the core, then naps. */
static void backoff(int64_t attempts) {
    const struct timespec nap = {0, NAP_NS};
    if (attempts < SPINS) PAUSE();
    else if (attempts < SPINS + YIELDS) sched_yield();
    else nanosleep(&nap, 0);
}

/* Its own items, which are the same from time to time and so in its caches; then what is left of the others'. */
static void run_items(ThreadPool *t, int64_t thread) {
    for (int64_t k = 0; k < t->threads; k++) {
        const int64_t whose = (thread + k) % t->threads;
        const int64_t begin = t->items * whose / t->threads, end = t->items * (whose + 1) / t->threads;
        int64_t item;
        while ((item = begin + __atomic_fetch_add(&t->claimed[whose * LINE], 1, __ATOMIC_RELAXED)) < end) t->job(t->given, item);
    }
}

/* Do all items of a job. Waits for helpers that have begun one, and for nobody to come. */
static void parallel_for(ThreadPool *t, Job *job, void *given, int64_t items) {
    if (t->threads == 1) {
        for (int64_t item = 0; item < items; item++) job(given, item);
        return;
    }
    for (int64_t k = 0; k < t->threads; k++) t->claimed[k * LINE] = 0;
    t->job = job, t->given = given, t->items = items;
    __atomic_store_n(&t->posted, t->posted + 1, __ATOMIC_RELAXED);
    __atomic_store_n(&t->accepting, 1, __ATOMIC_SEQ_CST);
    run_items(t, 0);
    __atomic_store_n(&t->accepting, 0, __ATOMIC_SEQ_CST);
    for (int64_t attempts = 0; __atomic_load_n(&t->active, __ATOMIC_SEQ_CST); attempts++) backoff(attempts);
}

/* Help until sent shutdown. */
void rayagi_pool_worker(ThreadPool *t, int64_t thread) {
    FLUSH_DENORMALS; /* as whoever it helps */
    int64_t seen = -1, attempts = 0;
    while (!__atomic_load_n(&t->shutdown, __ATOMIC_RELAXED)) {
        if (!__atomic_load_n(&t->accepting, __ATOMIC_RELAXED) || __atomic_load_n(&t->posted, __ATOMIC_RELAXED) == seen) {
            backoff(attempts++);
            continue;
        }
        attempts = 0;
        __atomic_fetch_add(&t->active, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&t->accepting, __ATOMIC_SEQ_CST)) { /* nobody changes the job while this one is active */
            seen = t->posted;
            run_items(t, thread);
        }
        __atomic_fetch_sub(&t->active, 1, __ATOMIC_SEQ_CST);
    }
}
