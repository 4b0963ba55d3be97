/* Thread pool. Thread 0 posts jobs; workers take items until shutdown.

A job is a function and a number of items. Each thread has a contiguous range of items and a counter of how many of them are
claimed. A thread claims its own items first, then those left in the other ranges. So each item is done exactly once, even if
workers start late. */
#include <sched.h>
#include <stdint.h>
#include <time.h>

typedef void Job(void *argument, int64_t item);

/* Shared by all threads of one pool. Python allocates it (learning.py), with all fields but ``threads`` and
   ``claimed`` 0. */
typedef struct {
    int64_t threads;   /* thread 0, which posts, included; constant */
    int64_t *claimed;  /* (threads, LINE): items claimed of each range, a cache line each. Thread 0 resets, all threads add */
    /* The job. Written by thread 0 while accepting = 0, after active was 0; read by workers inside the job. */
    Job *job;
    void *argument;
    int64_t items;
    int64_t posted;    /* jobs so far: by it a worker recognises a new job */
    /* The handshake: see parallel_for. */
    int64_t accepting; /* 1: workers may enter the job. Written by thread 0 */
    int64_t active;    /* workers inside the job. Written by workers */
    int64_t shutdown;  /* 1: workers return. Written by Python */
} ThreadPool;

enum { LINE = 8, SPINS = 2000, YIELDS = 500, NAP_NS = 50000 };

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE()
#endif

/* Wait before the next attempt: spin (some 100 us in all), then yield the core, then sleep. */
static void backoff(int64_t attempts) {
    const struct timespec nap = {0, NAP_NS};
    if (attempts < SPINS) PAUSE();
    else if (attempts < SPINS + YIELDS) sched_yield();
    else nanosleep(&nap, 0);
}

/* Claim and do items until all are claimed. A thread's own range is the same in every job of as many items, so its data
   are in that core's caches; the other ranges come after it.

   RELAXED: a claim only has to be atomic. What the items read and write is ordered by ``accepting`` and ``active``. */
static void run_items(ThreadPool *t, int64_t thread) {
    for (int64_t k = 0; k < t->threads; k++) {
        const int64_t owner = (thread + k) % t->threads;
        const int64_t begin = t->items * owner / t->threads, end = t->items * (owner + 1) / t->threads;
        int64_t item;
        while ((item = begin + __atomic_fetch_add(&t->claimed[owner * LINE], 1, __ATOMIC_RELAXED)) < end)
            t->job(t->argument, item);
    }
}

/* Do all items of a job, with the workers that come in time. Returns when every item is done.

   Thread 0 closes the job (accepting = 0), then reads ``active``. A worker enters (active + 1), then reads
   ``accepting``. All four accesses are SEQ_CST, so they have one total order: either the worker reads 0 and leaves, or
   thread 0 sees it and waits. Acquire and release alone would allow both to read the old value. */
static void parallel_for(ThreadPool *t, Job *job, void *argument, int64_t items) {
    if (t->threads == 1) {
        for (int64_t item = 0; item < items; item++) job(argument, item);
        return;
    }
    /* 1. Write the job. Plain stores: no worker is active, and those that enter see them through ``accepting``. */
    for (int64_t k = 0; k < t->threads; k++) t->claimed[k * LINE] = 0;
    t->job = job, t->argument = argument, t->items = items;
    __atomic_store_n(&t->posted, t->posted + 1, __ATOMIC_RELAXED); /* workers also poll it, outside the handshake */
    /* 2. Open it. The store publishes what 1 wrote. */
    __atomic_store_n(&t->accepting, 1, __ATOMIC_SEQ_CST);
    /* 3. Take part until every item is claimed. */
    run_items(t, 0);
    /* 4. Close it: workers that come now do not enter. */
    __atomic_store_n(&t->accepting, 0, __ATOMIC_SEQ_CST);
    /* 5. Wait for workers that have entered. Reading 0 makes their results visible. */
    for (int64_t attempts = 0; __atomic_load_n(&t->active, __ATOMIC_SEQ_CST); attempts++) backoff(attempts);
}

/* The loop of worker ``thread`` (1 to threads - 1). Returns after shutdown. */
void rayagi_pool_worker(ThreadPool *t, int64_t thread) {
    FLUSH_DENORMALS; /* the mode is per thread: the same as thread 0's */
    int64_t last_job = -1, attempts = 0;
    while (!__atomic_load_n(&t->shutdown, __ATOMIC_RELAXED)) {
        /* Poll for an open job that is new. RELAXED: only a hint, which the handshake below checks. */
        if (!__atomic_load_n(&t->accepting, __ATOMIC_RELAXED) || __atomic_load_n(&t->posted, __ATOMIC_RELAXED) == last_job) {
            backoff(attempts++);
            continue;
        }
        attempts = 0;
        /* Enter, then check that the job is still open. While this worker is active, thread 0 does not change the job. */
        __atomic_fetch_add(&t->active, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&t->accepting, __ATOMIC_SEQ_CST)) {
            last_job = t->posted;
            run_items(t, thread);
        }
        /* Leave. The release half publishes this worker's results to thread 0's load of 0. */
        __atomic_fetch_sub(&t->active, 1, __ATOMIC_SEQ_CST);
    }
}
