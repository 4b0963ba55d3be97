/* Barriers and reductions in shared memory. One call of run() is one operation of one member:

     1. begin()            stage the input (one-shot), publish the call, count the arrival
     2. await(FOR_ALL)     until every member has arrived
     3. all_called()       compare the calls; MISMATCHED if they differ
     4. reduce_two_shot()  claim chunks with fetch-and-add and reduce them: own share first, then the others' (two-shot)
     5. await(FOR_RESULT)  until every chunk is finished (two-shot)
     6. complete()         record success with a compare-and-swap; ABORTED if another member aborted first
     7. reduce_one_shot()  reduce all staged inputs into the member's own tensor (one-shot)

   Any member may reduce any chunk, so members that have a core never wait for one that has none.
   Nothing here allocates. A wait ends after its limit with TRY_AGAIN; the next call continues at the same step. */

#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64 /* bytes of a cache line */, MOST_MEMBERS = 256 };
enum { COMPLETE, TRY_AGAIN, MISMATCHED, ABORTED };    /* return values of run() */
enum { ARRIVE, AWAIT_ALL, AWAIT_RESULT };       /* member.next: the step at which run() continues */
enum { FOR_NOTHING, FOR_ALL, FOR_RESULT };      /* member_slot.sleeps: awake, or the event that ends the sleep */
enum { BARRIER_ONLY, ONE_SHOT, TWO_SHOT };              /* operation.kind */

/* The group's words in shared memory, in front of the members' slots (HEADER_BYTES in memory.py). */
struct header {
    uint64_t protocol; /* version, written by rank 0 before the others map the file */
    /* 2 * (number of the last complete operation) + ABORT_BIT. The bit says that the operation after it was aborted.
       Operations are numbered by arrivals. Any member writes it, by compare-and-swap only (sequentially consistent), and
       nothing follows an abort. So a member that aborts and a late one that completes cannot both succeed. */
    _Alignas(LINE) _Atomic uint64_t outcome;
    _Alignas(LINE) char rest[2 * LINE];
};
_Static_assert(sizeof(struct header) == 4 * LINE, "HEADER_BYTES of memory.py");
enum { ABORT_BIT = 1 };

/* One member's words in shared memory; *_py are used by waiting.py only. The owner writes a word unless stated otherwise.
   Words that are written at different times lie on different cache lines, which avoids false sharing. */
struct member_slot {
    /* Operations begun. Sequentially consistent: its store publishes calls, staged data and reset counters, and pairs with
       `sleeps` below. */
    _Alignas(4 * LINE) _Atomic uint64_t arrivals;
    uint64_t calls[2];       /* encoded call, at arrivals & 1: a fast member's next call overwrites no current one */
    uint64_t waiting_py;     /* 1 + the member whose counter it sleeps on; 0: awake */
    _Atomic uint32_t sleeps; /* futex word: FOR_*. The owner sets it; a waker, or a member that leaves, clears it */
    _Alignas(LINE) _Atomic uint64_t goodbye; /* 0 until it leaves; for waiting.py, first operation not completed */
    uint64_t kernel_py;                      /* fingerprint of this source, written before the first barrier */
    _Atomic uint64_t departures;             /* last operation that it returned from; relaxed, a hint for let_others_go() */
    uint64_t blamed_py;                      /* 1 + the member because of which it left; 0: none */
    /* Chunks of its share that members have claimed, at reductions & 1. Any member increments it, the owner resets it.
       Relaxed: only the uniqueness of the index matters; `arrivals` published the data before it. */
    _Alignas(LINE) _Atomic uint64_t claimed[2];
    /* Chunks of its share that are reduced. Any member adds, the owner resets it. Sequentially consistent: the addition
       publishes the written elements, all_finished() acquires them, and it pairs with `sleeps`. */
    _Alignas(LINE) _Atomic uint64_t finished[2];
    _Atomic uint64_t worked; /* last operation whose chunks it has left; tells which member is suspended within a chunk */
};
_Static_assert(sizeof(struct member_slot) == 4 * LINE, "LINES_PER_MEMBER of memory.py");

/* One process's private state; only its own thread reads and writes it. */
struct member {
    struct member_slot *slots; /* of all members, by rank */
    int32_t rank, size;
    int32_t oversubscribed; /* more members than cores */
    int32_t next;           /* ARRIVE, AWAIT_ALL or AWAIT_RESULT */
    uint64_t arrivals, reductions; /* operations begun; those of kind TWO_SHOT among them */
    int64_t limit_ns; /* longest sleep, nanoseconds */
    char *own;        /* input and output of ONE_SHOT, in private memory */
};

/* Arguments of an operation; equal on all members but for addresses. */
struct operation {
    uint64_t call; /* encoded call that members compare (calls.py) */
    /* operator: index into reducers. outputs: that many ranks, from 0 on, get the result; 0: each rank its own share. */
    int32_t kind, operator, outputs;
    int32_t element_bytes;
    uint64_t numel; /* elements of each member */
    char *pieces;   /* inputs in shared memory: rank r's begins at pieces + r * piece_bytes */
    uint64_t piece_bytes;
};

/* -- elements -- */

/* bfloat16 is the upper half of a float32. */
static inline float widened(uint16_t bfloat16) {
    uint32_t bits = (uint32_t)bfloat16 << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* To the nearest bfloat16, ties to even; a NaN becomes the quiet NaN. */
static inline uint16_t rounded(float wide) {
    uint32_t bits;
    memcpy(&bits, &wide, sizeof bits);
    return wide != wide ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define AS_IT_IS(value) (value)
#define ADD(total, part) ((total) + (part))
#define LARGER(total, part) ((total) > (part) || (total) != (total) ? (total) : (part)) /* propagates NaN */
#define DIVIDED(total) ((total) / divisor)
#define ROUND_DIVIDED(total) rounded((total) / divisor)

enum { BLOCK_BYTES = 256, AHEAD_BYTES = 512 };

typedef void reducer(char *const *parts, int size, char *const *outs, int outputs, uint64_t begin, uint64_t end);

/* Prefetch output lines for writing: the core gets them in exclusive state at once, not shared first and upgraded later. */
static inline void fetch(char *const *outs, int outputs, uint64_t at) {
    for (int r = 0; r < outputs; r++)
        for (int line = 0; line < BLOCK_BYTES; line += LINE) __builtin_prefetch(outs[r] + at + AHEAD_BYTES + line, 1);
}

#define INLINE static inline __attribute__((always_inline))
#define EACH _Pragma("GCC ivdep") for (uint64_t i = at; i < stop; i++)

/* Defines a reducer: out[i] = FINISH(COMBINE(... COMBINE(WIDEN(parts[0][i]), WIDEN(parts[1][i])) ...)), begin <= i < end,
   in rank order, so that results are bitwise equal on all members. For 2 to 4 parts `size` and `outputs` are constants at
   the call and totals stay in registers; for more, the totals of a block stay in the first-level cache. */
#define REDUCER(name, element, wide, WIDEN, COMBINE, FINISH)                                                             \
    INLINE void few_##name(char *const *parts, int size, char *const *outs, int outputs, uint64_t begin, uint64_t end) { \
        const wide divisor = (wide)size;                                                                                \
        const element *in[4];                                                                                           \
        element *out[4];                                                                                                \
        (void)divisor;                                                                                                  \
        for (int r = 0; r < size; r++) in[r] = (const element *)parts[r];                                               \
        for (int r = 0; r < outputs; r++) out[r] = (element *)outs[r];                                                  \
        for (uint64_t at = begin, stop; at < end; at = stop) {                                                          \
            stop = at + BLOCK_BYTES / sizeof(element) < end ? at + BLOCK_BYTES / sizeof(element) : end;                 \
            fetch(outs, outputs, at * sizeof(element));                                                                 \
            EACH {                                                                                                      \
                wide total = WIDEN(in[0][i]);                                                                           \
                for (int r = 1; r < size; r++) total = COMBINE(total, WIDEN(in[r][i]));                                 \
                element value = FINISH(total);                                                                          \
                for (int r = 0; r < outputs; r++) out[r][i] = value;                                                    \
            }                                                                                                           \
        }                                                                                                               \
    }                                                                                                                   \
    static void many_##name(char *const *parts, int size, char *const *outs, int outputs, uint64_t begin, uint64_t end) { \
        enum { BLOCK = 4 * BLOCK_BYTES / sizeof(element) };                                                             \
        const wide divisor = (wide)size;                                                                                \
        wide totals[BLOCK];                                                                                             \
        (void)divisor;                                                                                                  \
        for (uint64_t at = begin, stop; at < end; at = stop) {                                                          \
            stop = at + BLOCK < end ? at + BLOCK : end;                                                                 \
            const element *part = (const element *)parts[0];                                                            \
            wide *total = totals - at;                                                                                  \
            EACH total[i] = WIDEN(part[i]);                                                                             \
            for (int r = 1; r < size; r++) {                                                                            \
                part = (const element *)parts[r];                                                                       \
                EACH total[i] = COMBINE(total[i], WIDEN(part[i]));                                                      \
            }                                                                                                           \
            for (int r = 0; r < outputs; r++) {                                                                         \
                element *out = (element *)outs[r];                                                                      \
                EACH out[i] = FINISH(total[i]);                                                                         \
            }                                                                                                           \
        }                                                                                                               \
    }                                                                                                                   \
    static void name(char *const *parts, int size, char *const *outs, int outputs, uint64_t begin, uint64_t end) {      \
        if (size == 2 && outputs == 2) few_##name(parts, 2, outs, 2, begin, end);                                       \
        else if (size == 2) few_##name(parts, 2, outs, 1, begin, end);                                                  \
        else if (size == 3 && outputs == 3) few_##name(parts, 3, outs, 3, begin, end);                                  \
        else if (size == 4 && outputs == 4) few_##name(parts, 4, outs, 4, begin, end);                                  \
        else many_##name(parts, size, outs, outputs, begin, end);                                                       \
    }

REDUCER(sum_float32, float, float, AS_IT_IS, ADD, AS_IT_IS)
REDUCER(mean_float32, float, float, AS_IT_IS, ADD, DIVIDED)
REDUCER(max_float32, float, float, AS_IT_IS, LARGER, AS_IT_IS)
REDUCER(sum_float64, double, double, AS_IT_IS, ADD, AS_IT_IS)
REDUCER(mean_float64, double, double, AS_IT_IS, ADD, DIVIDED)
REDUCER(max_float64, double, double, AS_IT_IS, LARGER, AS_IT_IS)
REDUCER(sum_bfloat16, uint16_t, float, widened, ADD, rounded)
REDUCER(mean_bfloat16, uint16_t, float, widened, ADD, ROUND_DIVIDED)
REDUCER(max_bfloat16, uint16_t, float, widened, LARGER, rounded)
REDUCER(sum_int64, uint64_t, uint64_t, AS_IT_IS, ADD, AS_IT_IS) /* overflow wraps */
REDUCER(max_int64, int64_t, int64_t, AS_IT_IS, LARGER, AS_IT_IS)

static reducer *const reducers[] = { /* index: dtype * 3 + op, both in the order of kernel.py; 0: the mean of int64 */
    sum_float32,  mean_float32,  max_float32,  sum_float64, mean_float64, max_float64,
    sum_bfloat16, mean_bfloat16, max_bfloat16, sum_int64,   0,            max_int64,
};

/* -- shares and chunks -- */
enum { SHARE_ELEMENTS = 16, CHUNK_BYTES = 8192 };

/* The tensor has one share per member (as shares() of transports/base.py), a share has chunks of 8 KB. */
static uint64_t share_begin(const struct operation *o, int size, int rank) {
    uint64_t blocks = (o->numel + SHARE_ELEMENTS - 1) / SHARE_ELEMENTS;
    uint64_t begin = SHARE_ELEMENTS * (blocks * rank / size);
    return begin < o->numel ? begin : o->numel;
}

static uint64_t num_chunks(const struct operation *o, int size, int rank) {
    uint64_t elements = share_begin(o, size, rank + 1) - share_begin(o, size, rank);
    return (elements * o->element_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
}

/* Reduce one chunk of rank's share, and write it to every output: to ranks [0, outputs), or to rank alone. */
static void reduce_chunk(const struct operation *o, int size, int rank, uint64_t chunk) {
    char *parts[MOST_MEMBERS];
    for (int r = 0; r < size; r++) parts[r] = o->pieces + r * o->piece_bytes;
    uint64_t step = CHUNK_BYTES / o->element_bytes, last = share_begin(o, size, rank + 1);
    uint64_t begin = share_begin(o, size, rank) + chunk * step, end = begin + step < last ? begin + step : last;
    if (o->outputs) reducers[o->operator](parts, size, parts, o->outputs, begin, end);
    else reducers[o->operator](parts, size, parts + rank, 1, begin, end);
}

/* Reduce one member's share. The caller synchronizes. */
void reduce_share(const struct operation *o, int size, int rank) {
    for (uint64_t chunk = 0; chunk < num_chunks(o, size, rank); chunk++) reduce_chunk(o, size, rank, chunk);
}

/* -- outcome -- */
static _Atomic uint64_t *outcome_of(const struct member *m) { return &((struct header *)m->slots - 1)->outcome; }

/* Record that the current operation is complete, unless a member has. Returns 0 if it was aborted instead. */
static int complete(const struct member *m) {
    _Atomic uint64_t *outcome = outcome_of(m);
    uint64_t found = atomic_load(outcome);
    while (found >> 1 < m->arrivals && !(found & ABORT_BIT))
        if (atomic_compare_exchange_weak(outcome, &found, m->arrivals << 1)) return 1;
    return found >> 1 >= m->arrivals;
}

static int is_aborted(const struct member *m) {
    uint64_t found = atomic_load(outcome_of(m));
    return found & ABORT_BIT && found >> 1 < m->arrivals;
}

/* Abort the operation that this member has begun. Returns 0 if another completed it: run() then completes it here too.
   After an abort a suspended member may still finish the chunk that it had claimed. The others have replaced that memory by
   private copies before they return an error (Segment.close). It claims no other chunk, and completes nothing. */
int abort_operation(const struct member *m) {
    _Atomic uint64_t *outcome = outcome_of(m);
    uint64_t found = atomic_load(outcome);
    while (found >> 1 < m->arrivals && !(found & ABORT_BIT))
        if (atomic_compare_exchange_weak(outcome, &found, found | ABORT_BIT)) return 1;
    return found >> 1 < m->arrivals;
}

/* Claim and reduce chunks of one member's share until none is left. */
static void help(const struct member *m, const struct operation *o, int rank) {
    struct member_slot *s = m->slots + rank;
    int turn = m->reductions & 1;
    uint64_t chunk, done = 0, count = num_chunks(o, m->size, rank);
    /* The plain load before fetch_add keeps the line shared, and the counter bounded, once all chunks are claimed. */
    while (!is_aborted(m) && atomic_load_explicit(&s->claimed[turn], memory_order_relaxed) < count &&
           (chunk = atomic_fetch_add_explicit(&s->claimed[turn], 1, memory_order_relaxed)) < count) {
        reduce_chunk(o, m->size, rank, chunk);
        done++;
    }
    if (done) atomic_fetch_add(&s->finished[turn], done); /* publishes the elements written above */
}

/* -- waiting -- */
/* A wait polls SPIN_POLLS times, then yields its core between polls for YIELD_NS, then sleeps on a futex. A yield costs
   1 us per poll if the core is not contended; a futex wake-up costs some 30 us on a virtual machine, hence the yielding.
   SHORT_SLEEP_NS limits the sleep if a member has left. */
enum { SPIN_POLLS = 100, YIELD_NS = 200000, SHORT_SLEEP_NS = 1000000 };

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE()
#endif

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Sequentially consistent, like the stores that it reads. Two members each store one word and then load the other's
   (arrivals and arrivals, or arrivals and sleeps); at least one must see the other's store. With acquire loads both could
   miss it, on aarch64 from v8.3 on. */
static int all_arrived(const struct member *m) {
    for (int r = 0; r < m->size; r++)
        if (atomic_load(&m->slots[r].arrivals) < m->arrivals) return 0;
    return 1;
}

static int all_finished(const struct member *m, const struct operation *o) {
    for (int r = 0; r < m->size; r++)
        if (atomic_load(&m->slots[r].finished[m->reductions & 1]) < num_chunks(o, m->size, r))
            return 0;
    return 1;
}

static int is_over(const struct member *m, const struct operation *o, int what) {
    return all_arrived(m) && (what == FOR_ALL || all_finished(m, o));
}

/* Wake the members that sleep for this event. The exchange lets one waker alone make the system call. */
static void wake(const struct member *m, uint32_t what) {
    for (int r = 0; r < m->size; r++) {
        _Atomic uint32_t *word = &m->slots[r].sleeps;
        if (atomic_load(word) == what && atomic_exchange(word, FOR_NOTHING) == what)
            syscall(SYS_futex, word, FUTEX_WAKE, 1, 0, 0, 0);
    }
}

static int any_left(const struct member *m) {
    for (int r = 0; r < m->size; r++)
        if (atomic_load(&m->slots[r].goodbye)) return 1;
    return 0;
}

/* Wait for an event: poll, then poll and yield, then sleep once. Returns whether the event has happened. */
static int await(const struct member *m, const struct operation *o, int what) {
    /* 1. Poll. With fewer cores than members polling keeps others from running: once is enough. */
    for (int poll = 0; poll < (m->oversubscribed ? 1 : SPIN_POLLS); poll++) {
        if (is_over(m, o, what)) return 1;
        PAUSE();
    }
    /* 2. Yield between polls. */
    for (int64_t begin = now_ns(); now_ns() - begin < YIELD_NS;) {
        sched_yield();
        if (is_over(m, o, what)) return 1;
    }
    _Atomic uint32_t *word = &m->slots[m->rank].sleeps;
    /* 3. Sleep. An oversubscribed member would find no core to help on, so it sleeps until the result is complete. */
    uint32_t until = o->kind == TWO_SHOT && m->oversubscribed ? FOR_RESULT : what;
    atomic_store(word, until); /* before the loads below: pairs with a waker's store to arrivals or finished */
    /* A member that leaves stores goodbye, then clears this word: any_left() sees it, or FUTEX_WAIT returns at once. */
    int64_t limit_ns = any_left(m) && m->limit_ns > SHORT_SLEEP_NS ? SHORT_SLEEP_NS : m->limit_ns;
    struct timespec limit = {limit_ns / 1000000000, limit_ns % 1000000000};
    if (!is_over(m, o, what)) syscall(SYS_futex, word, FUTEX_WAIT, until, &limit, 0, 0);
    atomic_store(word, FOR_NOTHING);
    return is_over(m, o, what);
}

/* Yield until all members have left this operation, 2 * size times at most. Otherwise members that are queued on this core
   would wait for what this member does next. */
static void let_others_go(const struct member *m) {
    for (int turn = 0; turn < 2 * m->size; turn++) {
        int left = 0;
        for (int r = 0; r < m->size; r++)
            left += atomic_load_explicit(&m->slots[r].departures, memory_order_relaxed) >= m->arrivals;
        if (left == m->size) return;
        sched_yield();
    }
}

/* Stage the input, publish the call, then the arrival. The last member to arrive wakes those that sleep. */
static void begin(struct member *m, const struct operation *o) {
    struct member_slot *slot = m->slots + m->rank;
    if (o->kind == ONE_SHOT) memcpy(o->pieces + m->rank * o->piece_bytes, m->own, o->numel * o->element_bytes);
    m->reductions += o->kind == TWO_SHOT;
    slot->calls[++m->arrivals & 1] = o->call;
    atomic_store(&slot->arrivals, m->arrivals); /* publishes the call, the staged input and the reset counters */
    if (all_arrived(m)) wake(m, FOR_ALL);
}

static int all_called(const struct member *m, uint64_t call) {
    for (int r = 0; r < m->size; r++)
        if (m->slots[r].calls[m->arrivals & 1] != call) return 0;
    return 1;
}

/* One barrier in all: each receiving member reduces every staged input into its own tensor. Staging buffers alternate: one
   is refilled only after a later barrier, which members pass when they have read it. */
static void reduce_one_shot(const struct member *m, const struct operation *o) {
    char *parts[MOST_MEMBERS];
    for (int r = 0; r < m->size; r++) parts[r] = o->pieces + r * o->piece_bytes;
    if (m->rank < o->outputs) reducers[o->operator](parts, m->size, &m->own, 1, 0, o->numel);
}

static void reduce_two_shot(const struct member *m, const struct operation *o) {
    /* All members have arrived here, so all have left the previous reduction. Reset its counters for the next one; the next
       store to arrivals publishes them. */
    struct member_slot *slot = m->slots + m->rank;
    int next = (m->reductions + 1) & 1;
    atomic_store_explicit(&slot->claimed[next], 0, memory_order_relaxed);
    atomic_store_explicit(&slot->finished[next], 0, memory_order_relaxed);
    /* Own share first, then the others' in rank order from here on. */
    for (int r = 0; r < m->size; r++) help(m, o, (m->rank + r) % m->size);
    atomic_store_explicit(&slot->worked, m->arrivals, memory_order_relaxed);
    if (all_finished(m, o)) wake(m, FOR_RESULT);
}

/* Take part in an operation. TRY_AGAIN: the sleep timed out or a signal came; call again with the same arguments.
   MISMATCHED: members called different operations. ABORTED: another member aborted it. The last two are final. */
int run(struct member *m, const struct operation *o) {
    if (m->next == ARRIVE) {
        begin(m, o);
        m->next = AWAIT_ALL;
    }
    if (m->next == AWAIT_ALL) {
        if (!await(m, o, FOR_ALL)) return TRY_AGAIN;
        if (!all_called(m, o->call)) return MISMATCHED;
        if (o->kind == TWO_SHOT) reduce_two_shot(m, o);
        m->next = AWAIT_RESULT;
    }
    if (o->kind == TWO_SHOT && !await(m, o, FOR_RESULT)) return is_aborted(m) ? ABORTED : TRY_AGAIN;
    if (!complete(m)) return ABORTED;
    if (o->kind == ONE_SHOT) reduce_one_shot(m, o);
    m->next = ARRIVE;
    if (m->oversubscribed) {
        atomic_store_explicit(&m->slots[m->rank].departures, m->arrivals, memory_order_relaxed);
        let_others_go(m);
    }
    return COMPLETE;
}
