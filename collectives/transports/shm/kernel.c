/* Collectives in shared memory: one call arrives, waits for the others, reduces what nobody else has begun to reduce, and
   waits for the rest. Nothing here allocates; a wait ends after its limit, and the next call goes on where it ended.

   A reduction is split into a share per member, and a share into chunks, which are claimed one by one: each member begins
   with its own share and then helps with the others'. So whoever has a core works, and nobody waits for a member that has
   none. The last to arrive may well have done all when those that slept wake up. */

#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64, MOST_MEMBERS = 256 };
enum { COMPLETE, TRY_AGAIN, MISMATCHED, ABORTED };    /* what a call returns */
enum { ARRIVE, AWAIT_ALL, AWAIT_RESULT };       /* what a member does next */
enum { FOR_NOTHING, FOR_ALL, FOR_RESULT };      /* what a member sleeps for */
enum { BARRIER_ONLY, ONE_SHOT, TWO_SHOT };              /* kinds of operations */

/* What is the group's, before the members' words; also in memory.py. */
struct header {
    uint64_t protocol; /* of whoever made the memory */
    /* How the latest operation ended, for all members alike: 2 * (number of the last complete operation) + (whether the one
       after it was aborted). Operations are counted as arrivals are. Every write is a compare-and-swap, and nothing follows
       an abort: a member that gives an operation up and a late one that would complete it cannot both succeed. */
    _Alignas(LINE) _Atomic uint64_t outcome;
    _Alignas(LINE) char rest[2 * LINE];
};
_Static_assert(sizeof(struct header) == 4 * LINE, "HEADER_BYTES of memory.py");
enum { ABORT_BIT = 1 };

/* A member's words, also those of waiting.py. What is written at different times has lines of its own. */
struct member_slot {
    _Alignas(4 * LINE) _Atomic uint64_t arrivals;
    uint64_t calls[2]; /* what for, by turns: a fast member's next does not overwrite the one that a slow one compares */
    uint64_t waiting_py;
    _Atomic uint32_t sleeps; /* what for; it sleeps on this very word */
    _Alignas(LINE) _Atomic uint64_t goodbye;
    uint64_t kernel_py;
    _Atomic uint64_t departures;
    uint64_t blamed_py;
    _Alignas(LINE) _Atomic uint64_t claimed[2]; /* chunks of its share, by turns */
    _Alignas(LINE) _Atomic uint64_t finished[2];
    _Atomic uint64_t worked; /* the last arrival whose chunks it has left: who is suspended in one can be told */
};
_Static_assert(sizeof(struct member_slot) == 4 * LINE, "LINES_PER_MEMBER of memory.py");

/* One process's side. */
struct member {
    struct member_slot *slots;
    int32_t rank, size;
    int32_t oversubscribed; /* more members than cores */
    int32_t next;
    uint64_t arrivals, reductions;
    int64_t limit_ns; /* of one sleep */
    char *own;        /* its tensor, where all work alone, each into its own: it may be anywhere */
};

/* What all members do. */
struct operation {
    uint64_t call;
    int32_t kind, operator, outputs; /* so many members, from the first on, get the result; 0: each its share */
    int32_t element_bytes;
    uint64_t numel;
    char *pieces; /* rank 0's part; the others' follow at equal distances */
    uint64_t piece_bytes;
};

/* -- elements -- */

static inline float widened(uint16_t staging_buffer) {
    uint32_t bits = (uint32_t)staging_buffer << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static inline uint16_t rounded(float wide) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &wide, sizeof bits);
    return wide != wide ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define AS_IT_IS(value) (value)
#define ADD(total, part) ((total) + (part))
#define LARGER(total, part) ((total) > (part) || (total) != (total) ? (total) : (part)) /* a NaN stays */
#define DIVIDED(total) ((total) / divisor)
#define ROUND_DIVIDED(total) rounded((total) / divisor)

enum { BLOCK_BYTES = 256, AHEAD_BYTES = 512 };

typedef void reducer(char *const *parts, int size, char *const *outs, int outputs, uint64_t begin, uint64_t end);

/* Lines that will be written are fetched to be written: else another core gives them to read first, and then once more. */
static inline void fetch(char *const *outs, int outputs, uint64_t at) {
    for (int r = 0; r < outputs; r++)
        for (int line = 0; line < BLOCK_BYTES; line += LINE) __builtin_prefetch(outs[r] + at + AHEAD_BYTES + line, 1);
}

#define INLINE static inline __attribute__((always_inline))
#define EACH _Pragma("GCC ivdep") for (uint64_t i = at; i < stop; i++)

/* Elements [begin, end) of all parts in rank order, in blocks. Few parts: `size` and `outputs` are constants where it is
   called, and totals stay in registers. Many: a block's totals stay in the first-level cache. */
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

static reducer *const reducers[] = { /* in the order of kernel.py */
    sum_float32,  mean_float32,  max_float32,  sum_float64, mean_float64, max_float64,
    sum_bfloat16, mean_bfloat16, max_bfloat16, sum_int64,   0,            max_int64,
};

/* -- shares and chunks -- */
enum { SHARE_ELEMENTS = 16, CHUNK_BYTES = 8192 };

static uint64_t share_begin(const struct operation *o, int size, int rank) { /* as collectives/shares.py */
    uint64_t blocks = (o->numel + SHARE_ELEMENTS - 1) / SHARE_ELEMENTS;
    uint64_t begin = SHARE_ELEMENTS * (blocks * rank / size);
    return begin < o->numel ? begin : o->numel;
}

static uint64_t num_chunks(const struct operation *o, int size, int rank) {
    uint64_t elements = share_begin(o, size, rank + 1) - share_begin(o, size, rank);
    return (elements * o->element_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
}

static void reduce_chunk(const struct operation *o, int size, int rank, uint64_t chunk) {
    char *parts[MOST_MEMBERS];
    for (int r = 0; r < size; r++) parts[r] = o->pieces + r * o->piece_bytes;
    uint64_t step = CHUNK_BYTES / o->element_bytes, last = share_begin(o, size, rank + 1);
    uint64_t begin = share_begin(o, size, rank) + chunk * step, end = begin + step < last ? begin + step : last;
    if (o->outputs) reducers[o->operator](parts, size, parts, o->outputs, begin, end);
    else reducers[o->operator](parts, size, parts + rank, 1, begin, end);
}

/* One member's share, without a word to the others. */
void reduce_share(const struct operation *o, int size, int rank) {
    for (uint64_t chunk = 0; chunk < num_chunks(o, size, rank); chunk++) reduce_chunk(o, size, rank, chunk);
}

/* -- outcome -- */
static _Atomic uint64_t *outcome_of(const struct member *m) { return &((struct header *)m->slots - 1)->outcome; }

/* Say that the operation of this arrival is complete, unless somebody did. Whether it is: else it was aborted. */
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

/* Give up the operation that this member has begun. 0: another member completed it, and run() completes it here, too.
   After an abort a suspended member may still finish a chunk that it had begun, in memory that the others let go of before
   they return an error (Segment.close); it reservations no other chunk, and completes nothing. */
int abort_operation(const struct member *m) {
    _Atomic uint64_t *outcome = outcome_of(m);
    uint64_t found = atomic_load(outcome);
    while (found >> 1 < m->arrivals && !(found & ABORT_BIT))
        if (atomic_compare_exchange_weak(outcome, &found, found | ABORT_BIT)) return 1;
    return found >> 1 < m->arrivals;
}

/* Whatever of a member's share nobody has begun. */
static void help(const struct member *m, const struct operation *o, int rank) {
    struct member_slot *s = m->slots + rank;
    int turn = m->reductions & 1;
    uint64_t chunk, done = 0, count = num_chunks(o, m->size, rank);
    while (!is_aborted(m) && atomic_load_explicit(&s->claimed[turn], memory_order_relaxed) < count &&
           (chunk = atomic_fetch_add_explicit(&s->claimed[turn], 1, memory_order_relaxed)) < count) {
        reduce_chunk(o, m->size, rank, chunk);
        done++;
    }
    if (done) atomic_fetch_add(&s->finished[turn], done);
}

/* -- waiting -- */
/* In nanoseconds: offering costs who has its core alone a microsecond a look, and waking a sleeper some 30 on a virtual
   machine. Members that sleep too early make each other late. */
enum { FIRST_LOOKS = 100, OFFER_NS = 200000, NAP_NS = 1000000 };

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

/* Sequentially consistent, as are the stores that they gather_members: of two members that each store and then look (arrivals and
   arrivals, arrivals and sleeps), one sees the other's store. With acquire alone both could miss it, on aarch64 from v8.3. */
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

/* Look, then announce_kernel the processor to others between looks, then sleep. Whether it is over within the limit. */
static int await(const struct member *m, const struct operation *o, int what) {
    for (int look = 0; look < (m->oversubscribed ? 1 : FIRST_LOOKS); look++) {
        if (is_over(m, o, what)) return 1;
        PAUSE();
    }
    for (int64_t begin = now_ns(); now_ns() - begin < OFFER_NS;) {
        sched_yield();
        if (is_over(m, o, what)) return 1;
    }
    _Atomic uint32_t *word = &m->slots[m->rank].sleeps;
    /* There is no core for who sleeps while others work: it wakes when the result is there. */
    uint32_t until = o->kind == TWO_SHOT && m->oversubscribed ? FOR_RESULT : what;
    atomic_store(word, until);
    /* Who leaves says goodbye and then clears this word: seen here, or the sleep ends at once. */
    int64_t limit_ns = any_left(m) && m->limit_ns > NAP_NS ? NAP_NS : m->limit_ns;
    struct timespec limit = {limit_ns / 1000000000, limit_ns % 1000000000};
    if (!is_over(m, o, what)) syscall(SYS_futex, word, FUTEX_WAIT, until, &limit, 0, 0);
    atomic_store(word, FOR_NOTHING);
    return is_over(m, o, what);
}

/* Those that wait on this core for their turn would otherwise wait for what this member does next. */
static void let_others_go(const struct member *m) {
    for (int turn = 0; turn < 2 * m->size; turn++) {
        int left = 0;
        for (int r = 0; r < m->size; r++)
            left += atomic_load_explicit(&m->slots[r].departures, memory_order_relaxed) >= m->arrivals;
        if (left == m->size) return;
        sched_yield();
    }
}

static void begin(struct member *m, const struct operation *o) {
    struct member_slot *slot = m->slots + m->rank;
    if (o->kind == ONE_SHOT) memcpy(o->pieces + m->rank * o->piece_bytes, m->own, o->numel * o->element_bytes);
    m->reductions += o->kind == TWO_SHOT;
    slot->calls[++m->arrivals & 1] = o->call;
    atomic_store(&slot->arrivals, m->arrivals);
    if (all_arrived(m)) wake(m, FOR_ALL);
}

static int all_called(const struct member *m, uint64_t call) {
    for (int r = 0; r < m->size; r++)
        if (m->slots[r].calls[m->arrivals & 1] != call) return 0;
    return 1;
}

static void reduce_one_shot(const struct member *m, const struct operation *o) {
    char *parts[MOST_MEMBERS];
    for (int r = 0; r < m->size; r++) parts[r] = o->pieces + r * o->piece_bytes;
    if (m->rank < o->outputs) reducers[o->operator](parts, m->size, &m->own, 1, 0, o->numel);
}

static void reduce_two_shot(const struct member *m, const struct operation *o) {
    /* All have left the reduction before this one; its counters are those of the next. */
    struct member_slot *slot = m->slots + m->rank;
    int next = (m->reductions + 1) & 1;
    atomic_store_explicit(&slot->claimed[next], 0, memory_order_relaxed);
    atomic_store_explicit(&slot->finished[next], 0, memory_order_relaxed);
    for (int r = 0; r < m->size; r++) help(m, o, (m->rank + r) % m->size);
    atomic_store_explicit(&slot->worked, m->arrivals, memory_order_relaxed);
    if (all_finished(m, o)) wake(m, FOR_RESULT);
}

/* Take part in an operation. TRY_AGAIN: the limit has passed in sleep, or a signal came; call again with the same. MISMATCHED: members
   came for different operations. ABORTED: another member gave it up. Neither of these two changes by another call. */
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
    if (o->kind == ONE_SHOT) reduce_one_shot(m, o); /* into its own tensor, from what all have staged */
    m->next = ARRIVE;
    if (m->oversubscribed) {
        atomic_store_explicit(&m->slots[m->rank].departures, m->arrivals, memory_order_relaxed);
        let_others_go(m);
    }
    return COMPLETE;
}
