/* Litmus tests of kernel.c and shared_words.c, whose members are threads here: natively, under ThreadSanitizer, and for other
   processors under an emulator. See test_litmus.py.

       litmus MEMBERS ROUNDS      prints what went wrong, and returns how often */
#define _GNU_SOURCE
#include KERNEL_C
#include SHARED_WORDS_C

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { NUMEL = 20000, MOST = 8 };
static const int64_t SLEEP_NS = 50000000;

/* Memory as in Segment: header, members' slots, two staging buffers, one registered buffer. */
static struct {
    struct header header;
    struct member_slot slots[MOST];
    _Alignas(LINE) float halves[2][MOST][NUMEL];
    _Alignas(LINE) float buffers[MOST][NUMEL];
} shared;

static int size, rounds;
static atomic_long wrong;

static void expect(int holds, const char *what, int rank, int round) {
    if (!holds && atomic_fetch_add(&wrong, 1) < 10) printf("%s: member %d, round %d\n", what, rank, round);
}

static void in_threads(int count, void *(*work)(void *)) {
    pthread_t threads[MOST];
    for (intptr_t k = 0; k < count; k++) pthread_create(threads + k, 0, work, (void *)k);
    for (int k = 0; k < count; k++) pthread_join(threads[k], 0);
}

static float value(int rank, int round, int i) { return rank + round % 97 + i % 31; } /* sums are exact */

static float sum(int round, int i) {
    float total = 0;
    for (int rank = 0; rank < size; rank++) total += value(rank, round, i);
    return total;
}

/* -- operations of all kinds, by turns: no member reads data that is not published yet, or stale data -- */

static void *operate(void *given) {
    const int rank = (int)(intptr_t)given;
    static const int kinds[] = {ONE_SHOT, ONE_SHOT, ONE_SHOT, BARRIER_ONLY, TWO_SHOT, TWO_SHOT};
    struct member m = {.slots = shared.slots, .rank = rank, .size = size, .limit_ns = SLEEP_NS};
    float *own = malloc(NUMEL * sizeof *own);
    m.own = (char *)own;
    m.oversubscribed = size > 2;
    for (int round = 0, half = 0; round < rounds; round++) {
        const int kind = kinds[round % 6], scatters = round % 6 == 5, numel = 1 + round * 37 % NUMEL;
        float *tensor = kind == ONE_SHOT ? own : shared.buffers[rank];
        struct operation o = {.call = round, .kind = kind, .outputs = scatters ? 0 : size, .element_bytes = 4, .numel = numel};
        o.pieces = (char *)(kind == ONE_SHOT ? shared.halves[half ^= 1] : shared.buffers);
        o.piece_bytes = NUMEL * sizeof(float);
        for (int i = 0; i < numel; i++) tensor[i] = value(rank, round, i);
        int state;
        while ((state = run(&m, &o)) == TRY_AGAIN) {}
        expect(state == COMPLETE, "not complete", rank, round);
        if (kind == BARRIER_ONLY) continue;
        uint64_t begin = scatters ? share_begin(&o, size, rank) : 0, end = scatters ? share_begin(&o, size, rank + 1) : numel;
        for (uint64_t i = begin; i < end; i++) {
            if (tensor[i] == sum(round, i)) continue;
            expect(0, "wrong sum", rank, round);
            break;
        }
    }
    free(own);
    return 0;
}

/* -- one member aborts while the other arrives: both complete the operation, or neither -- */

static pthread_barrier_t both;
static int completed[2];

static void *give_up_or_come(void *given) {
    const int rank = (int)(intptr_t)given;
    for (int round = 0; round < rounds; round++) {
        pthread_barrier_wait(&both);
        if (rank == 0) memset(&shared.header, 0, sizeof shared.header), memset(shared.slots, 0, sizeof shared.slots);
        pthread_barrier_wait(&both);
        struct member m = {.slots = shared.slots, .rank = rank, .size = 2, .oversubscribed = 1, .limit_ns = rank ? SLEEP_NS : 0};
        struct operation o = {.kind = round % 2 ? TWO_SHOT : BARRIER_ONLY, .outputs = 2, .element_bytes = 4, .numel = 100};
        o.pieces = (char *)shared.buffers;
        o.piece_bytes = NUMEL * sizeof(float);
        int state;
        if (rank == 0) { /* polls for YIELD_NS, then aborts */
            state = run(&m, &o);
            if (state == TRY_AGAIN) state = abort_operation(&m) ? ABORTED : run(&m, &o);
        } else {
            for (int64_t begin = now_ns(); now_ns() - begin < YIELD_NS - 20000 + round % 64 * 1000;) {}
            while ((state = run(&m, &o)) == TRY_AGAIN) {}
        }
        completed[rank] = state == COMPLETE;
        pthread_barrier_wait(&both);
        if (rank == 0) expect(completed[0] == completed[1], "completed by one alone", state, round);
    }
    return 0;
}

/* -- words that Python reads and writes -- */

static struct {
    _Alignas(LINE) _Atomic uint64_t flag;
    _Alignas(LINE) _Atomic uint64_t answer;
    _Alignas(LINE) _Atomic uint64_t stored[2];
    _Alignas(LINE) uint64_t data[16];
} words;

/* Message passing: a reader that sees the word sees the data that was written before it. */
static void *pass_messages(void *given) {
    for (uint64_t round = 1; round <= (uint64_t)rounds; round++) {
        if (!given) {
            for (int k = 0; k < 16; k++) words.data[k] = round + k;
            rayagi_store(&words.flag, round);
            while (rayagi_load(&words.answer) < round) sched_yield();
        } else {
            while (rayagi_load(&words.flag) < round) sched_yield();
            for (int k = 0; k < 16; k++) expect(words.data[k] == round + k, "message before its data", 1, round);
            rayagi_store(&words.answer, round);
        }
    }
    return 0;
}

/* Store buffering: of two threads that store a word and then load the other's, one sees it (a sleeper and its waker). */
static uint64_t loaded[2];

static void *store_and_load(void *given) {
    const int rank = (int)(intptr_t)given;
    for (int round = 1; round <= rounds; round++) {
        pthread_barrier_wait(&both);
        rayagi_store(&words.stored[rank], round);
        loaded[rank] = rayagi_load(&words.stored[1 - rank]);
        pthread_barrier_wait(&both);
        if (rank == 0) expect(loaded[0] == (uint64_t)round || loaded[1] == (uint64_t)round, "both missed", rank, round);
    }
    return 0;
}

#ifndef __SANITIZE_THREAD__ /* a seqlock: readers race with the writer by design, and discard what they read */
static struct {
    _Alignas(LINE) _Atomic uint64_t published;
    _Alignas(LINE) _Atomic uint64_t held[3][8];
    volatile uint64_t copies[3][64];
    _Atomic uint64_t over;
} parameter_store;

/* As parameters.py publishes and reads. */
static void *publish_or_read(void *given) {
    if (!given) {
        for (uint64_t version = 1; version <= (uint64_t)rounds; version++) {
            const uint64_t copy = version % 3;
            rayagi_store(parameter_store.held[copy], 0);
            for (int k = 0; k < 64; k++) parameter_store.copies[copy][k] = version;
            rayagi_store(parameter_store.held[copy], version);
            rayagi_store(&parameter_store.published, version << 2 | copy);
        }
        rayagi_store(&parameter_store.over, 1);
        return 0;
    }
    for (int reads = 0; !rayagi_load(&parameter_store.over); reads++) {
        const uint64_t published = rayagi_load(&parameter_store.published), copy = published & 3;
        uint64_t found[64], differ = 0;
        for (int k = 0; k < 64; k++) found[k] = parameter_store.copies[copy][k];
        if (!published || rayagi_load(parameter_store.held[copy]) != published >> 2) continue;
        for (int k = 0; k < 64; k++) differ |= found[k] != published >> 2;
        expect(!differ, "torn parameters", 1, reads);
    }
    return 0;
}
#endif

int main(int count, char **arguments) {
    if (count != 3) return 2;
    size = atoi(arguments[1]), rounds = atoi(arguments[2]);
    pthread_barrier_init(&both, 0, 2);
    in_threads(size, operate);
    in_threads(2, give_up_or_come);
    in_threads(2, pass_messages);
    in_threads(2, store_and_load);
#ifndef __SANITIZE_THREAD__
    in_threads(2, publish_or_read);
#endif
    printf("%ld wrong\n", atomic_load(&wrong));
    return wrong != 0;
}
