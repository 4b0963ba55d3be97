/* Threads that share out one program's work: one asks, the others help until they are sent home. */
#include <sched.h>
#include <stdint.h>
#include <time.h>

typedef void Job(void *given, int64_t item);

typedef struct {
    int64_t threads; /* who asks is the first of them */
    int64_t *taken;  /* (threads, LINE): of each thread's items, how many are taken */
    Job *job;
    void *given;
    int64_t items;
    int64_t posted; /* jobs */
    int64_t open;   /* whether the last one may be entered */
    int64_t inside; /* helpers */
    int64_t home;   /* whether nothing more comes */
} Team;

enum { LINE = 8, LOOKS = 2000, OFFERS = 500, NAP_NS = 50000 };

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE()
#endif

/* After so many looks in vain: some 100 us of them, then as many of offers of the core, then naps. */
static void rest(int64_t looks) {
    const struct timespec nap = {0, NAP_NS};
    if (looks < LOOKS) PAUSE();
    else if (looks < LOOKS + OFFERS) sched_yield();
    else nanosleep(&nap, 0);
}

/* Its own items, which are the same from time to time and so in its caches; then what is left of the others'. */
static void work(Team *t, int64_t thread) {
    for (int64_t k = 0; k < t->threads; k++) {
        const int64_t whose = (thread + k) % t->threads;
        const int64_t begin = t->items * whose / t->threads, end = t->items * (whose + 1) / t->threads;
        int64_t item;
        while ((item = begin + __atomic_fetch_add(&t->taken[whose * LINE], 1, __ATOMIC_RELAXED)) < end) t->job(t->given, item);
    }
}

/* Do all items of a job. Waits for helpers that have begun one, and for nobody to come. */
static void share_out(Team *t, Job *job, void *given, int64_t items) {
    if (t->threads == 1) {
        for (int64_t item = 0; item < items; item++) job(given, item);
        return;
    }
    for (int64_t k = 0; k < t->threads; k++) t->taken[k * LINE] = 0;
    t->job = job, t->given = given, t->items = items;
    __atomic_store_n(&t->posted, t->posted + 1, __ATOMIC_RELAXED);
    __atomic_store_n(&t->open, 1, __ATOMIC_SEQ_CST);
    work(t, 0);
    __atomic_store_n(&t->open, 0, __ATOMIC_SEQ_CST);
    for (int64_t looks = 0; __atomic_load_n(&t->inside, __ATOMIC_SEQ_CST); looks++) rest(looks);
}

/* Help until sent home. */
void rayagi_help(Team *t, int64_t thread) {
    FLUSH_DENORMALS; /* as whoever it helps */
    int64_t seen = -1, looks = 0;
    while (!__atomic_load_n(&t->home, __ATOMIC_RELAXED)) {
        if (!__atomic_load_n(&t->open, __ATOMIC_RELAXED) || __atomic_load_n(&t->posted, __ATOMIC_RELAXED) == seen) {
            rest(looks++);
            continue;
        }
        looks = 0;
        __atomic_fetch_add(&t->inside, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&t->open, __ATOMIC_SEQ_CST)) { /* nobody changes the job while this one is inside */
            seen = t->posted;
            work(t, thread);
        }
        __atomic_fetch_sub(&t->inside, 1, __ATOMIC_SEQ_CST);
    }
}
