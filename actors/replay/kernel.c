/* A replay store in shared memory: block allocator, status table, trees, selection and collection.

Who writes what, in which order (docs/explanation/replay.md has the picture):

- Lock-guarded: everything in Header, links, trees, priorities and times sampled. The lock is a robust mutex: if its owner
  is killed, the kernel hands it to the next process, which rebuilds all of that from the tags.
- Row.tag is the truth about an index: generation * 4 + state. It changes under the lock and is read without it.
- Blocks of an index in state WRITING belong to its owner alone; others' blocks are read without the lock, as in a seqlock:
  read tag, copy, read tag again. A different tag means that the copy may be mixed, and is reported, never returned as good.
- Row.slot says which blocks an index has: it changes under the lock too. A row that loses its blocks counts Warmth.moves,
  and so does one that gets them: readers check both like the tag, since it may have got the same slot again meanwhile.
- All of it is shared memory, in which a faulty program of the same user may have written anything. So links, slots and
  lengths are checked where they are used: a request that finds a wrong one is refused as DAMAGED. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <linux/futex.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { FREE, WRITING, COMMITTED, DELETED };
enum { FIFO, LIFO, OLDEST, LOWEST_PRIORITY, RANDOM, USER };
enum { ROWS, WINDOWS, PRIORITIES, TIMESTAMPS, LEAST_PRIORITIES };
enum { IN_PLACE, HEAD, TAIL };
enum { STALE, VALID, OUTSIDE };
enum { INSERT, SAMPLE }; /* kinds of requests that the rate limiter knows */
/* Results below 0: why nothing was done. */
enum { LOCK_TIMEOUT = -1, ALL_WRITING = -2, NEED_VICTIM = -3, NOT_OWNED = -4, EMPTY = -5, NO_SLOT = -6, IO_ERROR = -7, NO_MEMORY = -8, FOREIGN = -9, NO_IDENTITY = -10, LIMITED = -11, DAMAGED = -12, NO_STEP = -13, TOO_LARGE = -14 };
enum { NONE = -1, FANOUT = 8, MAX_LEVELS = 14, BIT_LEVELS = 3, GROUP_BITS = 512, REAP_NS = 100000000, CHUNK = 32, AHEAD = 8, LINE = 64, FETCHED = 512, SPINS = 200, GROUP = 16, ATTEMPTS = 3, WAITERS = 32, BINS = 64, OBSERVED = 8, FEW_BYTES = 8192, YIELDS = 500 };
/* Rows that return to memory: reads of each index in an epoch, on average; the highest count; slots that are compared for the
   least; by how much a row must be read more often than twice the one that makes room; most in one CHUNK. */
enum { EPOCH_READS = 8, MOST_HEAT = 255, EXAMINED = 8, MARGIN = 4, MOST_PROMOTED = 2 };

/* Status of one index: a cache line. */
typedef struct {
    uint64_t tag;       /* generation << 2 | state; atomic. The generation grows with every allocation of the index */
    uint64_t owner;     /* in state WRITING the process that fills it: process id << 42 | its start time; then rows drawn before its commit */
    double priority;
    int64_t timestamp;
    uint64_t sequence;  /* number of its commit: order of insertion */
    uint32_t length;    /* timesteps */
    int32_t slot;       /* its blocks in memory; NONE: they are in the file of spilled rows */
    uint64_t sampled;   /* times selected since its commit */
    int32_t next, prev; /* links: committed rows by sequence, rows that are being written, or free indices by time of use */
} Row;

/* Rate limiter: how many rows may be drawn per row inserted. error = samples_per_insert * inserts - samples + offset.

   A request is judged by the error before it, not by the error that it will leave: insertion if error <= above, sampling if
   error > -below. So one of the two is admitted in every state, whatever the sizes of requests. */
typedef struct {
    double samples_per_insert, below, above; /* 0 without a ratio; the error buffer towards samples, and towards inserts */
    double offset;            /* error when the limit was set */
    double timeout_s;         /* longest wait of a request; read by Python */
    int64_t min_size;         /* committed rows, below which insertion is admitted and sampling is not */
    int64_t inserts, samples; /* rows since the limit was set; atomic. inserts begins at minus what is missing to min_size */
} Limit;

/* A request that waits for the rate limiter. owner is stored last, and is 0 where the place is free. */
typedef struct { uint64_t owner; int64_t kind, rows, since_ns; } Waiter;

/* Of one index, if rows are spilled. */
typedef struct {
    uint64_t filed;     /* generation whose blocks the file has. Under the lock */
    uint32_t moves;     /* times that it was about to lose or get a slot. Under the lock; atomic */
    uint16_t heat;      /* reads: epoch << 8 | count. Atomic, written by readers without the lock: a count may be lost */
    uint16_t unused;
} Warmth;

/* Counters and list ends. Guarded by the lock; readers without it get values that may be a moment old. */
typedef struct {
    uint64_t magic;     /* stored last by the creator */
    int64_t removal, max_sampled;
    int64_t count, writing, high;        /* committed rows, rows being written, indices ever used */
    int64_t free, first_free, last_free; /* indices that can be allocated; the one to be used next, and last */
    int64_t oldest, newest, writers;     /* first and last committed row; first row that is being written */
    uint64_t sequence, random;           /* commits so far; state of the generator of random removal */
    int64_t hand, next_reap_ns;          /* next slot to be spilled; next search for dead writers */
    int64_t inserted, selected, evicted, deleted, reclaimed, spilled, recovered; /* selected: atomic, without the lock */
    int64_t promoted, read, read_from_file; /* of spilled tables; the last two: atomic, without the lock */
    int64_t thawed;     /* times that a checkpoint, or nothing, has replaced everything */
    uint64_t version;   /* odd while a process has the lock. Written by it, read by draws without the lock */
    int64_t in_file;    /* committed rows that are spilled */
    int64_t limit;      /* 0: no limiter; else 1 + the entry of limits in use. Stored once the other entry is complete */
    Limit limits[2];
    uint32_t asleep[2]; /* futex words by kind: 1 from before a process sleeps until a request may be admitted until it is woken */
    int64_t waits[2], waited_ns[2]; /* by kind, of requests that have ended; atomic */
    Waiter waiters[WAITERS];
    int64_t ages[BINS], staleness[BINS]; /* of drawn rows, atomic. Bin 0: at most 0; bin b: 2^(b - 1) to 2^b - 1 */
} Header;

/* Sums (or minima) of a function of the status, over groups of FANOUT indices, over groups of these, up to the root.

   Node j of level l covers the *global* indices j * 8^l to (j + 1) * 8^l - 1. So the nodes of a shard are those of the tree
   of all shards, except for those at its edges, which lack what other shards have.

   A tree of ROWS, whose leaves are 0 and 1, has a bit for each leaf: level[0] is its words, from that of index
   first & ~(GROUP_BITS - 1) on. The nodes up to BIT_LEVELS - 1 are counted where they are needed, 512 bits being a cache line
   too. So a row takes 0.14 bytes instead of 9.1. */
typedef struct {
    double *level[MAX_LEVELS];  /* of node first & ~7: groups of FANOUT fill cache lines */
    int64_t first[MAX_LEVELS], nodes[MAX_LEVELS];
    int64_t levels, kind, window, stride;
    double exponent;
} Tree;

/* One field. A row's blocks are neighbours: this one begins at offset + s * row_bytes of the memory for slot s, and at
   offset + i * row_bytes of the file for a spilled row of index i. It has ``extra`` steps more than the trajectory: 1 for
   observations that include the last one. */
typedef struct { int64_t offset, step_bytes, row_bytes, extra; } Column;

/* What a process needs to use a store. */
typedef struct {
    Header *header;
    pthread_mutex_t *lock;
    Row *rows;
    int32_t *slot_rows;          /* row of each slot, if rows are spilled */
    uint8_t *data;
    Column *columns;
    Tree *trees;
    int64_t capacity, base, slots, num_columns, num_trees, removal_tree; /* removal_tree: NONE unless it is by a minimum */
    int64_t max_length;          /* timesteps of the longest trajectory */
    Warmth *warmth;              /* only if rows are spilled */
    int64_t spill;               /* descriptor of the file of spilled rows, or NONE */
    int64_t limit_ns;            /* longest wait for the lock */
    int64_t on_disk;             /* 1: the blocks are a mapped file, whose pages may have to be read */
    int64_t *scratch, scratch_size; /* node numbers, of the process that has the lock */
    int64_t damaged;             /* 1 once this process has found that the shared memory is damaged */
} Store;

/* A window of a column about each selected timestep. */
typedef struct {
    int64_t column, offset, length, padding;
    uint8_t *out, *mask;         /* (n, length, step_bytes); (n, length) */
} Part;

static int64_t state_of(const Row *r) { return __atomic_load_n(&r->tag, __ATOMIC_ACQUIRE) & 3; }

/* Under the lock. RELEASE: what was written before (status, blocks) is seen by whoever reads this tag with ACQUIRE. */
static void set_tag(Row *r, uint64_t generation, int64_t state) {
    __atomic_store_n(&r->tag, generation << 2 | state, __ATOMIC_RELEASE);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* ---- processes -------------------------------------------------------------------------------------------------------- */

static const uint64_t UNKNOWN = UINT64_MAX;
static const uint64_t NOBODY = 1; /* owner of a row that was given up: no process has id 0 */

/* Process id << 42 | start time in clock ticks; 0 if there is no such process, or it only waits for its parent; UNKNOWN if
   that cannot be read, as without a free descriptor: such a process may be writing. */
static uint64_t identity(int64_t pid) {
    char path[40], text[1024];
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return errno == ENOENT || errno == ESRCH ? 0 : UNKNOWN;
    const ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0) return 0;
    text[size] = 0;
    const char *at = strrchr(text, ')'); /* the name before it may contain anything */
    if (!at || at[2] == 'Z' || at[2] == 'X') return 0;
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    return at ? (uint64_t)pid << 42 | (strtoull(at, 0, 10) & ((1ull << 42) - 1)) : 0;
}

static uint64_t own_identity(void) {
    static __thread uint64_t own; /* a forked child has another process id */
    const int64_t pid = getpid();
    if ((int64_t)(own >> 42) != pid) own = identity(pid);
    return own;
}

/* ---- trees ------------------------------------------------------------------------------------------------------------ */

static int is_minimum(const Tree *t) { return t->kind >= TIMESTAMPS; }
static double idle(const Tree *t) { return is_minimum(t) ? INFINITY : 0.0; }
static int has_bits(const Tree *t) { return t->kind == ROWS; }
/* The lowest level above which all nodes are in memory as numbers. */
static int64_t lowest(const Tree *t) { return has_bits(t) ? BIT_LEVELS : 0; }
static double *group(const Tree *t, int64_t l, int64_t parent) {
    return t->level[l] + (FANOUT * parent - (t->first[l] & ~7ll));
}
static double *node(const Tree *t, int64_t l, int64_t j) { return t->level[l] + (j - (t->first[l] & ~7ll)); }

/* The bits of indices 64 * j to 64 * j + 63. */
static uint64_t *word(const Tree *t, int64_t j) {
    return (uint64_t *)t->level[0] + (j - (t->first[0] & ~(GROUP_BITS - 1ll)) / 64);
}

/* Value of a node, whether it is in memory or counted. */
static double value_of(const Tree *t, int64_t l, int64_t j) {
    if (l >= lowest(t)) return *node(t, l, j);
    const int64_t first = j << 3 * l, bits = 1ll << 3 * l; /* of 64 at most: they lie in one word */
    return __builtin_popcountll(*word(t, first >> 6) >> (first & 63) & (bits == 64 ? ~0ull : (1ull << bits) - 1));
}

/* What the values of the children of a node of level l + 1 are read from: a cache line. l: lowest(t) - 1 or more. */
static const void *group_memory(const Tree *t, int64_t l, int64_t parent) {
    return l < lowest(t) ? (const void *)word(t, FANOUT * parent) : group(t, l, parent);
}

/* Values of the children of a node of level l + 1, in memory or in ``room`` (FANOUT). */
static const double *children(const Tree *t, int64_t l, int64_t parent, double *room) {
    if (l >= lowest(t)) return group(t, l, parent);
    for (int64_t c = 0; c < FANOUT; c++) room[c] = value_of(t, l, FANOUT * parent + c);
    return room;
}

static void set_leaf(const Tree *t, int64_t j, double value) {
    if (!has_bits(t)) { *node(t, 0, j) = value; return; }
    uint64_t *w = word(t, j >> 6);
    *w = (*w & ~(1ull << (j & 63))) | (uint64_t)(value > 0.0) << (j & 63);
}

/* Set the levels of a tree of indices base to base + capacity - 1 of total, by its kind. Returns its bytes. */
int64_t replay_tree_layout(Tree *t, uint8_t *memory, int64_t base, int64_t capacity, int64_t total) {
    int64_t bytes = 0;
    t->levels = 0;
    for (int64_t l = 0, shift = 0; l < MAX_LEVELS; l++, shift += 3) {
        const int64_t first = base >> shift, last = (base + capacity - 1) >> shift;
        t->first[l] = first, t->nodes[l] = last - first + 1;
        t->level[l] = memory ? (double *)(memory + bytes) : 0;
        if (l >= lowest(t)) bytes += ((last | 7) - (first & ~7ll) + 1) * (int64_t)sizeof(double);
        else if (!l) bytes += ((last | (GROUP_BITS - 1)) - (first & ~(GROUP_BITS - 1ll)) + 1) / 8;
        t->levels = l + 1;
        if (l && l >= lowest(t) && (total - 1) >> shift == 0) break; /* at least one group: the root's children */
    }
    return bytes;
}

static void recompute(const Tree *t, int64_t l, int64_t j) {
    if (has_bits(t) && l == BIT_LEVELS) {
        const uint64_t *w = word(t, FANOUT * j);
        int64_t count = 0;
        for (int i = 0; i < FANOUT; i++) count += __builtin_popcountll(w[i]);
        *node(t, l, j) = (double)count;
        return;
    }
    const double *restrict c = group(t, l - 1, j);
    double value = c[0];
    /* One order of additions, whatever the shards: what another shard has is 0 here. */
    if (is_minimum(t)) for (int i = 1; i < FANOUT; i++) value = c[i] < value ? c[i] : value;
    else for (int i = 1; i < FANOUT; i++) value += c[i];
    *node(t, l, j) = value;
}

/* Recompute all nodes above these leaves, level by level. ``nodes``: global leaf indices; overwritten. */
static void refresh(const Tree *t, int64_t n, int64_t *nodes) {
    int64_t shift = has_bits(t) ? 3 * BIT_LEVELS : 3; /* from a leaf to the lowest node that is in memory */
    for (int64_t l = shift / 3; l < t->levels; l++, shift = 3) {
        if (n >= t->nodes[l]) { /* the whole level, in order */
            for (int64_t j = t->first[l]; j < t->first[l] + t->nodes[l]; j++) recompute(t, l, j);
            continue;
        }
        int64_t kept = 0, last = NONE;
        for (int64_t i = 0; i < n; i++) {
            if (i + AHEAD < n) {
                const int64_t next = nodes[i + AHEAD] >> shift;
                __builtin_prefetch(group_memory(t, l - 1, next));
                __builtin_prefetch(node(t, l, next), 1);
            }
            const int64_t parent = nodes[i] >> shift;
            if (parent == last) continue;
            recompute(t, l, parent);
            nodes[kept++] = last = parent;
        }
        n = kept;
    }
}

/* Recompute a whole tree from its leaves. */
void replay_tree_build(const Tree *t) { refresh(t, INT64_MAX, 0); }

/* Set leaves. Of an index that occurs twice, the last value counts. ``nodes``: (n,) scratch. */
void replay_tree_set(const Tree *t, int64_t n, const int64_t *indices, const double *values, int64_t *nodes) {
    for (int64_t i = 0; i < n; i++) {
        if (i + AHEAD < n && !has_bits(t)) __builtin_prefetch(node(t, 0, indices[i + AHEAD]), 1);
        set_leaf(t, indices[i], values[i]);
    }
    memcpy(nodes, indices, n * sizeof *nodes);
    refresh(t, n, nodes);
}

/* The child of a node that holds the target: the last c with s_0 + .. + s_(c-1) <= target. The target becomes the rest. */
static int64_t choose(const double *restrict s, double *target) {
    /* In registers and without branches: prefix sums do not fall, so the last that is reached is the child's. */
    double prefix = 0.0, before = 0.0;
    int64_t c = 0;
    for (int i = 1; i < FANOUT; i++) {
        prefix += s[i - 1];
        const int reached = *target >= prefix;
        c += reached, before = reached ? prefix : before;
    }
    /* Rounding may leave a rest that is as large as the child: the largest number below it instead. */
    const double rest = *target - before;
    *target = rest < s[c] ? rest : nextafter(s[c], 0.0);
    return c;
}

/* A node of this level. Sums that change during a draw without the lock may lead to one that does not exist; the draw is
   then repeated, but must not read elsewhere. */
static int64_t within(const Tree *t, int64_t l, int64_t j) {
    const int64_t first = t->first[l], last = first + t->nodes[l] - 1;
    return j < first ? first : j > last ? last : j;
}

/* The last of eight positions that holds a rank below 64: counts, at most 8 or 64 in all, are the bytes of a word. The rank
   becomes the rest. */
static int64_t choose_byte(uint64_t counts, uint64_t *rank) {
    const uint64_t ones = 0x0101010101010101ull, highs = 0x8080808080808080ull;
    /* Byte i: c_0 + .. + c_(i-1), at most 64. Byte i of the difference keeps its high bit where that is <= rank. */
    const uint64_t before = counts * ones << 8;
    const int64_t c = __builtin_popcountll(((*rank | 0x80) * ones - before) & highs) - 1;
    *rank -= before >> 8 * c & 0xff;
    return c;
}

/* The leaf of a node of level BIT_LEVELS that holds the target: the bit of rank floor(target). The target becomes the rest.
   These are the numbers that choose() gives level by level: for whole sums its differences are exact. */
static int64_t choose_bit(const uint64_t *restrict w, double *target) {
    const uint64_t ones = 0x0101010101010101ull;
    /* Of sums that change during a draw without the lock, any number may come; the draw is then repeated. */
    uint64_t rank = *target >= 0.0 && *target < GROUP_BITS ? (uint64_t)*target : GROUP_BITS - 1;
    *target -= (double)rank;
    /* 1. The word. */
    uint64_t prefix = 0, before = 0;
    int64_t c = 0;
    for (int i = 1; i < FANOUT; i++) {
        prefix += (uint64_t)__builtin_popcountll(w[i - 1]);
        const int reached = rank >= prefix;
        c += reached, before = reached ? prefix : before;
    }
    rank = (rank - before) & 63;
    /* 2. The byte: bits counted in pairs, in fours, in bytes. */
    uint64_t counts = w[c] - (w[c] >> 1 & 0x5555555555555555ull);
    counts = (counts & 0x3333333333333333ull) + (counts >> 2 & 0x3333333333333333ull);
    counts = (counts + (counts >> 4)) & 0x0f0f0f0f0f0f0f0full;
    const int64_t byte = choose_byte(counts, &rank);
    /* 3. The bit: bit i of the byte, alone in byte i, as 0 or 1. */
    const uint64_t spread = (w[c] >> 8 * byte & 0xff) * ones & 0x8040201008040201ull;
    rank &= 63;
    return 64 * c + 8 * byte + choose_byte((spread + 0x7f7f7f7f7f7f7f7full) >> 7 & ones, &rank);
}

/* Leaves that hold the targets, from the root. Targets become the rest within the leaf. Groups of draws go down together,
   so that the cache misses of one overlap those of the others. */
void replay_tree_draw(const Tree *t, int64_t n, double *targets, int64_t *leaves) {
    const int64_t low = lowest(t);
    for (int64_t begin = 0; begin < n; begin += GROUP) {
        const int64_t size = n - begin < GROUP ? n - begin : GROUP;
        int64_t at[GROUP] = {0};
        for (int64_t l = t->levels - 1; l > low; l--)
            for (int64_t i = 0; i < size; i++) {
                at[i] = within(t, l - 1, FANOUT * at[i] + choose(group(t, l - 1, at[i]), &targets[begin + i]));
                if (l > 1) __builtin_prefetch(group_memory(t, l - 2, at[i]));
            }
        if (low)
            for (int64_t i = 0; i < size; i++)
                at[i] = within(t, 0, GROUP_BITS * at[i] + choose_bit(word(t, FANOUT * at[i]), &targets[begin + i]));
        for (int64_t i = 0; i < size; i++) leaves[begin + i] = at[i];
    }
}

/* The same from a node of each draw's own. */
void replay_tree_descend(const Tree *t, int64_t n, const int64_t *level, const int64_t *from, double *targets, int64_t *leaves) {
    double room[FANOUT];
    for (int64_t i = 0; i < n; i++) {
        int64_t at = from[i];
        for (int64_t l = level[i]; l > 0; l--)
            at = within(t, l - 1, FANOUT * at + choose(children(t, l - 1, at, room), &targets[i]));
        leaves[i] = at;
    }
}

static double total_of(const Tree *t) { return *t->level[t->levels - 1]; }

/* Global index of the least leaf; the first of equals. NONE if all are idle, or a node is not the minimum of its children. */
static int64_t least(const Tree *t) {
    const double value = total_of(t);
    int64_t at = 0;
    if (value == INFINITY) return NONE;
    for (int64_t l = t->levels - 1; l > 0; l--) {
        const double *c = group(t, l - 1, at);
        int64_t i = 0;
        while (i < FANOUT && c[i] != value) i++;
        if (i == FANOUT || within(t, l - 1, FANOUT * at + i) != FANOUT * at + i) return NONE;
        at = FANOUT * at + i;
    }
    return at;
}

/* A timestamp as a double that compares as it does. The bit keeps it from being denormal, which some threads flush to 0. */
static double ordered(int64_t timestamp) {
    const int64_t bits = timestamp | 1ll << 62;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static double raised(const Tree *t, double priority) {
    return t->exponent == 1.0 ? priority : priority > 0.0 ? pow(priority, t->exponent) : 0.0;
}

static double leaf_of(const Tree *t, const Row *r) {
    if (state_of(r) != COMMITTED) return idle(t);
    switch (t->kind) {
    case ROWS: return 1.0;
    case WINDOWS: return r->length < t->window ? 0.0 : (double)((r->length - t->window) / t->stride + 1);
    case PRIORITIES:
        if (r->length < t->window) return 0.0;
        return raised(t, r->priority);
    case TIMESTAMPS: return ordered(r->timestamp);
    default: return r->priority;
    }
}

static int64_t reserve_scratch(Store *s, int64_t n) {
    if (n <= s->scratch_size) return 0;
    int64_t *grown = realloc(s->scratch, n * sizeof *grown);
    if (!grown) return NO_MEMORY;
    s->scratch = grown, s->scratch_size = n;
    return 0;
}

/* A process needs the store no more. */
int64_t replay_release(Store *s) {
    free(s->scratch);
    s->scratch = 0, s->scratch_size = 0;
    return 0;
}

/* The leaves of rows by global index, which are bits. Words in a register: neighbours are often set together. */
static void set_bits(const Store *s, const Tree *t, int64_t n, const int64_t *indices) {
    uint64_t *at = 0, bits = 0;
    for (int64_t i = 0; i < n; i++) {
        if (i + AHEAD < n) __builtin_prefetch(word(t, indices[i + AHEAD] >> 6), 1);
        uint64_t *w = word(t, indices[i] >> 6);
        if (w != at) {
            if (at) *at = bits;
            at = w, bits = *w;
        }
        const uint64_t present = state_of(&s->rows[indices[i] - s->base]) == COMMITTED;
        bits = (bits & ~(1ull << (indices[i] & 63))) | present << (indices[i] & 63);
    }
    if (at) *at = bits;
}

/* Bring one tree up to date with the status of these rows, by global index. known: their leaves where they are long enough,
   NAN where that is not known; or 0. */
static void update_tree(Store *s, const Tree *t, int64_t n, const int64_t *indices, const double *known) {
    if (has_bits(t)) set_bits(s, t, n, indices);
    else for (int64_t i = 0; i < n; i++) {
        if (i + AHEAD < n) __builtin_prefetch(node(t, 0, indices[i + AHEAD]), 1);
        const Row *r = &s->rows[indices[i] - s->base];
        *node(t, 0, indices[i]) = !known || isnan(known[i]) ? leaf_of(t, r) : r->length < t->window ? 0.0 : known[i];
    }
    memcpy(s->scratch, indices, n * sizeof *indices);
    refresh(t, n, s->scratch);
}

static void update_trees(Store *s, int64_t n, const int64_t *indices) {
    for (int64_t k = 0; n && k < s->num_trees; k++) update_tree(s, &s->trees[k], n, indices, 0);
}

/* ---- lists, under the lock ------------------------------------------------------------------------------------------- */

/* Remember that the shared memory is damaged, if a condition is not met that it must meet. Returns the condition. */
static int require(Store *s, int condition) {
    if (__builtin_expect(!condition, 0)) __atomic_store_n(&s->damaged, 1, __ATOMIC_RELAXED);
    return condition;
}

static int is_local(const Store *s, int64_t i) { return (uint64_t)i < (uint64_t)s->capacity; }
static int is_link(const Store *s, int64_t i) { return (uint64_t)(i - NONE) <= (uint64_t)s->capacity; } /* a row or NONE */

/* Whether i is an index in this state. */
static int has_state(Store *s, int64_t i, int64_t state) {
    return require(s, is_local(s, i) && state_of(&s->rows[i]) == state);
}

/* Whether row i's links lead to rows, or nowhere. The neighbours are not read: they need not be in the cache. */
static int has_links(Store *s, int64_t i) {
    return require(s, is_link(s, s->rows[i].prev) & is_link(s, s->rows[i].next));
}

/* Link row i behind row ``after`` of a list; NONE: at its begin. */
static void link_behind(Store *s, int64_t *first, int64_t *last, int64_t after, int64_t i) {
    if (!require(s, is_link(s, after))) return;
    const int64_t next = after == NONE ? *first : s->rows[after].next;
    if (!require(s, is_link(s, next))) return;
    s->rows[i].prev = after, s->rows[i].next = next;
    if (after == NONE) *first = i; else s->rows[after].next = i;
    if (next == NONE) *last = i; else s->rows[next].prev = i;
}

/* Take row i out of the list that it is in. Returns 0 if its links are damaged. */
static int unlink_from(Store *s, int64_t *first, int64_t *last, int64_t i) {
    const Row *r = &s->rows[i];
    if (!has_links(s, i)) return 0;
    if (r->prev == NONE) *first = r->next; else s->rows[r->prev].next = r->next;
    if (r->next == NONE) *last = r->prev; else s->rows[r->next].prev = r->prev;
    return 1;
}

static void push_free(Store *s, int64_t i) {
    Header *h = s->header;
    link_behind(s, &h->first_free, &h->last_free, h->last_free, i);
    h->free++;
}

static void unlink_free(Store *s, int64_t i) {
    Header *h = s->header;
    h->free -= unlink_from(s, &h->first_free, &h->last_free, i);
}

static int is_free(const Store *s, int64_t i) {
    const int64_t state = state_of(&s->rows[i]);
    return state == FREE || state == DELETED;
}

/* The next free index, or DAMAGED. */
static int64_t pop_free(Store *s) {
    const int64_t i = s->header->first_free;
    if (!require(s, is_local(s, i) && is_free(s, i))) return DAMAGED;
    unlink_free(s, i);
    return i;
}

static void link_committed(Store *s, int64_t after, int64_t i) {
    Header *h = s->header;
    link_behind(s, &h->oldest, &h->newest, after, i);
    h->count++, h->in_file += s->rows[i].slot == NONE;
}

static void unlink_committed(Store *s, int64_t i) {
    Header *h = s->header;
    if (!unlink_from(s, &h->oldest, &h->newest, i)) return;
    h->count--, h->in_file -= s->rows[i].slot == NONE;
}

static void link_writing(Store *s, int64_t i) {
    Header *h = s->header;
    int64_t last; /* nobody needs it */
    link_behind(s, &h->writers, &last, NONE, i);
    h->writing++;
}

static void unlink_writing(Store *s, int64_t i) {
    Header *h = s->header;
    int64_t last; /* nobody needs it */
    h->writing -= unlink_from(s, &h->writers, &last, i);
}

static int is_slot(const Store *s, int64_t slot) { return (uint64_t)slot < (uint64_t)s->slots; }
/* Whether there are blocks for a row: in a slot, or in the file of spilled rows. */
static int has_blocks(const Store *s, int64_t slot) { return is_slot(s, slot) || (slot == NONE && s->spill != NONE); }

static int by_sequence(const void *a, const void *b, void *rows) {
    const Row *r = rows;
    const uint64_t x = r[*(const int64_t *)a].sequence, y = r[*(const int64_t *)b].sequence;
    return x < y ? -1 : x > y;
}

/* Make everything that the lock guards anew from the tags. Used by the creator, and after a process died with the lock: it
   may have changed some of it, but a tag changes at once or not at all. */
static int64_t rebuild(Store *s) {
    Header *h = s->header;
    int64_t committed = 0, retired = s->capacity;
    int64_t *order = malloc(s->capacity * sizeof *order);
    if (!order) return NO_MEMORY;
    h->count = h->writing = h->high = h->in_file = 0, h->oldest = h->newest = h->writers = NONE;
    h->free = 0, h->first_free = h->last_free = NONE;
    for (int64_t j = 0; s->spill != NONE && j < s->slots; j++) s->slot_rows[j] = NONE;
    for (int64_t i = 0; i < s->capacity; i++) {
        Row *r = &s->rows[i];
        int64_t state = state_of(r);
        if (state == COMMITTED && h->max_sampled && r->sampled >= (uint64_t)h->max_sampled)
            set_tag(r, r->tag >> 2, state = DELETED); /* who counted its last selection died before it deleted the row */
        if (r->tag >> 2) h->high = i + 1;
        if (state == FREE) push_free(s, i);
        if (state == WRITING) link_writing(s, i);
        if (state == COMMITTED) order[committed++] = i;
        if (state == DELETED) order[--retired] = i;
        if (state != FREE && r->sequence > h->sequence) h->sequence = r->sequence;
        if (s->spill != NONE && r->slot != NONE && require(s, is_slot(s, r->slot))) s->slot_rows[r->slot] = i;
        for (int64_t k = 0; k < s->num_trees; k++) set_leaf(&s->trees[k], s->base + i, leaf_of(&s->trees[k], r));
    }
    qsort_r(order, committed, sizeof *order, by_sequence, s->rows);
    qsort_r(order + retired, s->capacity - retired, sizeof *order, by_sequence, s->rows);
    for (int64_t k = 0; k < committed; k++) link_committed(s, h->newest, order[k]);
    for (int64_t k = retired; k < s->capacity; k++) push_free(s, order[k]); /* deleted ones are reused last */
    for (int64_t k = 0; k < s->num_trees; k++) replay_tree_build(&s->trees[k]);
    free(order);
    return 0;
}

/* After an attempt to lock: rebuild what its owner left, if that died. */
static int64_t enter(Store *s, int error) {
    if (error == 0 || error == EOWNERDEAD) {
        /* Odd, before anything changes: a draw that reads changed sums then reads a changed version. */
        __atomic_store_n(&s->header->version, s->header->version | 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE);
    }
    if (error == EOWNERDEAD) {
        const int64_t failed = rebuild(s);
        if (failed) return failed; /* unlocked by the kernel when this process ends: another one rebuilds */
        pthread_mutex_consistent(s->lock);
        s->header->recovered++;
        return 0;
    }
    return error ? LOCK_TIMEOUT : 0;
}

/* Where the C library can, by a clock that nobody sets: else a step of the time of day changes the limit. */
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 30)
#define LOCK_CLOCK CLOCK_MONOTONIC
static int timed_lock(pthread_mutex_t *mutex, const struct timespec *until) { return pthread_mutex_clocklock(mutex, LOCK_CLOCK, until); }
#else
#define LOCK_CLOCK CLOCK_REALTIME
static int timed_lock(pthread_mutex_t *mutex, const struct timespec *until) { return pthread_mutex_timedlock(mutex, until); }
#endif

static int64_t lock(Store *s) {
    struct timespec until;
    int error = EBUSY;
    if (s->damaged) return DAMAGED;
    for (int spin = 0; spin < SPINS && error == EBUSY; spin++) error = pthread_mutex_trylock(s->lock);
    if (error == EBUSY) {
        clock_gettime(LOCK_CLOCK, &until);
        until.tv_nsec += s->limit_ns % 1000000000, until.tv_sec += s->limit_ns / 1000000000;
        if (until.tv_nsec >= 1000000000) until.tv_nsec -= 1000000000, until.tv_sec++;
        error = timed_lock(s->lock, &until);
    }
    return enter(s, error);
}

/* ---- rate limiter ----------------------------------------------------------------------------------------------------- */

/* The limit in use, or NULL. Of a limit that is replaced at this moment, values may be of both: whoever is refused looks
   again. */
static Limit *limit_of(Header *h) {
    const int64_t limit = __atomic_load_n(&h->limit, __ATOMIC_ACQUIRE);
    return limit ? &h->limits[(limit - 1) & 1] : 0;
}

static int has_limit_or_none(const Header *h) { return (uint64_t)h->limit <= 2; }

static double error_of(const Limit *l) {
    return l->samples_per_insert * (double)__atomic_load_n(&l->inserts, __ATOMIC_RELAXED)
           - (double)__atomic_load_n(&l->samples, __ATOMIC_RELAXED) + l->offset;
}

/* Whether a request of this kind is admitted now. above >= -below, so one of the two always is. */
static int admits(Header *h, int64_t kind) {
    const Limit *l = limit_of(h);
    if (!l) return 1;
    const int filled = h->count >= l->min_size;
    return kind == INSERT ? !filled || error_of(l) <= l->above : filled && error_of(l) > -l->below;
}

/* Wake those who sleep until a request of this kind is admitted, if it is. Called after every change that may admit it. */
static void notify(Header *h, int64_t kind) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* the change before the flag is read; replay_wait does the opposite */
    if (!__atomic_load_n(&h->asleep[kind], __ATOMIC_RELAXED) || !admits(h, kind)) return;
    __atomic_store_n(&h->asleep[kind], 0, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &h->asleep[kind], FUTEX_WAKE, INT_MAX, 0, 0, 0);
}

static int64_t unlock(Store *s, int64_t result) {
    Header *h = s->header;
    /* Even again, after everything: RELEASE. */
    __atomic_store_n(&h->version, h->version + 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(s->lock);
    if (h->limit) notify(h, INSERT), notify(h, SAMPLE);
    require(s, has_limit_or_none(h));
    return s->damaged ? DAMAGED : result;
}

/* Whether a request of this kind is admitted; if not, sleep until it may be, for at most sleep_ns, and look again. Who is
   killed between the two steps of notify() wakes nobody: sleeps are short. */
int64_t replay_wait(Store *s, int64_t kind, int64_t sleep_ns) {
    uint32_t *asleep = &s->header->asleep[kind];
    const struct timespec limit = {sleep_ns / 1000000000, sleep_ns % 1000000000};
    if (!sleep_ns) return admits(s->header, kind);
    __atomic_store_n(asleep, 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* the flag before the counters are read */
    if (admits(s->header, kind)) return 1;
    syscall(SYS_futex, asleep, FUTEX_WAIT, 1, &limit, 0, 0);
    return admits(s->header, kind);
}

static int has_ended(uint64_t owner) {
    const uint64_t found = identity(owner >> 42);
    return found != owner && found != UNKNOWN;
}

/* Name this process as waiting. Returns its place; NONE if all are taken by living processes, or this one has no identity. */
int64_t replay_wait_begin(Store *s, int64_t kind, int64_t rows) {
    const uint64_t self = own_identity();
    int64_t place = NONE;
    if (!self || self == UNKNOWN) return NONE;
    const int64_t failed = lock(s);
    if (failed) return failed;
    for (int64_t i = 0; i < WAITERS && place == NONE; i++) {
        Waiter *w = &s->header->waiters[i];
        const uint64_t owner = __atomic_load_n(&w->owner, __ATOMIC_ACQUIRE);
        if (owner && !has_ended(owner)) continue;
        w->kind = kind, w->rows = rows, w->since_ns = now_ns();
        __atomic_store_n(&w->owner, self, __ATOMIC_RELEASE);
        place = i;
    }
    return unlock(s, place);
}

/* The wait has ended. place: as of replay_wait_begin, or below 0. */
int64_t replay_wait_end(Store *s, int64_t kind, int64_t place, int64_t waited_ns) {
    Header *h = s->header;
    if (place >= 0) __atomic_store_n(&h->waiters[place].owner, 0, __ATOMIC_RELEASE);
    __atomic_fetch_add(&h->waits[kind], 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&h->waited_ns[kind], waited_ns, __ATOMIC_RELAXED);
    return 0;
}

/* Who waits, for how long: out (WAITERS), with ``since_ns`` as a duration. Those who have ended are forgotten. Returns how many. */
int64_t replay_waiters(Store *s, Waiter *out) {
    int64_t found = 0;
    const int64_t failed = lock(s);
    if (failed) return failed;
    for (int64_t i = 0; i < WAITERS; i++) {
        Waiter *w = &s->header->waiters[i];
        out[found] = *w;
        if (!out[found].owner) continue;
        if (has_ended(out[found].owner)) { w->owner = 0; continue; }
        out[found].since_ns = now_ns() - out[found].since_ns;
        found++;
    }
    return unlock(s, found);
}

/* Replace the limit; NULL: none. restored: with the counters and offset of ``given``; else inserts and samples count from now
   on, and the error is what it was, as far as the new error buffer has it. Otherwise a changed ratio would judge all of the
   past by a rule that it did not follow, and might stop one side for as long as the past was. */
int64_t replay_limit(Store *s, const Limit *given, int64_t restored) {
    Header *h = s->header;
    const int64_t failed = lock(s);
    if (failed) return failed;
    if (!require(s, has_limit_or_none(h))) return unlock(s, DAMAGED);
    const Limit *before = limit_of(h);
    const int64_t next = h->limit == 1 ? 2 : 1;
    if (given) {
        Limit *l = &h->limits[next - 1];
        *l = *given;
        if (!restored) {
            const double early = before && before->inserts < 0 ? before->samples_per_insert * (double)before->inserts : 0.0;
            const double error = before ? error_of(before) - early : 0.0; /* rows that are missing to min_size are no error */
            l->offset = error < -l->below ? -l->below : error > l->above ? l->above : error;
            l->inserts = h->count < l->min_size ? h->count - l->min_size : 0, l->samples = 0;
        }
    }
    /* One store: a process that is killed before it has changed nothing. */
    __atomic_store_n(&h->limit, given ? next : 0, __ATOMIC_RELEASE);
    unlock(s, 0);
    notify(h, INSERT), notify(h, SAMPLE); /* also if there is none any more */
    return 0;
}

/* Add to the error of the limit in use, if there is one. A table of several shards moves error between them by this. */
int64_t replay_shift_error(Store *s, double shift) {
    const int64_t failed = lock(s);
    if (failed) return failed;
    Limit *l = limit_of(s->header);
    if (l) l->offset += shift;
    return unlock(s, 0);
}

/* Initialise the memory of a new store: zeroed, except for the constants of the header. */
int64_t replay_create(Store *s) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(s->lock, &attributes);
    for (int64_t i = 0; i < s->capacity; i++) s->rows[i].slot = s->spill == NONE ? i : NONE;
    for (int64_t k = 0; k < s->num_trees; k++) {
        Tree *t = &s->trees[k];
        for (int64_t l = 0; is_minimum(t) && l < t->levels; l++)
            for (double *c = group(t, l, t->first[l] >> 3), *end = node(t, l, (t->first[l] + t->nodes[l] - 1) | 7); c <= end; c++)
                *c = INFINITY;
    }
    return rebuild(s);
}

/* ---- insertion and removal -------------------------------------------------------------------------------------------- */

/* Free rows of writers that have ended. A row that was not committed is torn: nobody has ever seen it. */
static int64_t reap(Store *s) {
    Header *h = s->header;
    uint64_t known = 0;
    int64_t reclaimed = 0, alive = 0, seen = 0;
    for (int64_t i = h->writers, next; i != NONE; i = next) {
        /* A list that comes back to one of its rows has more than there are. */
        if (!has_state(s, i, WRITING) || !require(s, seen++ < s->capacity)) break;
        Row *r = &s->rows[i];
        next = r->next;
        const uint64_t owner = __atomic_load_n(&r->owner, __ATOMIC_ACQUIRE); /* may be given up at this moment */
        if (owner != known) {
            known = owner;
            const uint64_t found = identity(known >> 42);
            alive = found == known || found == UNKNOWN;
        }
        if (alive) continue;
        unlink_writing(s, i);
        set_tag(r, r->tag >> 2, FREE);
        push_free(s, i);
        reclaimed++;
    }
    h->reclaimed += reclaimed;
    return reclaimed;
}

int64_t replay_reap(Store *s) {
    const int64_t failed = lock(s);
    return failed ? failed : unlock(s, reap(s));
}

/* A committed row to be overwritten, by the store's policy, or DAMAGED. It is unlinked; its leaf is cleared by the caller,
   except in the tree that chose it. */
static int64_t victim(Store *s) {
    Header *h = s->header;
    const Tree *t = s->removal_tree == NONE ? 0 : &s->trees[s->removal_tree];
    int64_t i;
    if (h->removal == FIFO) i = h->oldest;
    else if (h->removal == LIFO) i = h->newest;
    else if (!t) i = NONE;
    else if (h->removal == RANDOM) { /* xorshift64*; the tree holds 1 for each committed row */
        int64_t leaf;
        h->random ^= h->random >> 12, h->random ^= h->random << 25, h->random ^= h->random >> 27;
        double target = (double)((h->random * 2685821657736338717ull) >> 11) * 0x1p-53 * total_of(t);
        replay_tree_draw(t, 1, &target, &leaf);
        i = leaf - s->base;
    } else i = least(t) - s->base;
    if (!has_state(s, i, COMMITTED)) return DAMAGED;
    unlink_committed(s, i);
    h->evicted++;
    if (t) {
        int64_t leaf = s->base + i;
        set_leaf(t, leaf, idle(t));
        refresh(t, 1, &leaf);
    }
    return i;
}

/* now: 0 if no row was being written before this request. */
static int64_t obtain(Store *s, int64_t now) {
    Header *h = s->header;
    for (int attempt = 0;; attempt++) {
        if (h->free) return pop_free(s);
        if (h->writers != NONE && (now >= h->next_reap_ns || !h->count) && !attempt) {
            h->next_reap_ns = now + REAP_NS;
            reap(s);
            continue;
        }
        if (!h->count) return ALL_WRITING;
        return h->removal == USER ? NEED_VICTIM : victim(s);
    }
}

static int64_t write_all(int file, void *from, size_t size, int64_t at) {
    for (ssize_t done; size; from = (uint8_t *)from + done, at += done, size -= done)
        if ((done = pwrite(file, from, size, at)) <= 0) {
            if (done < 0 && errno == EINTR) { done = 0; continue; }
            return IO_ERROR;
        }
    return 0;
}

static int64_t read_all(int file, void *to, size_t size, int64_t at) {
    for (ssize_t done; size; to = (uint8_t *)to + done, at += done, size -= done)
        if ((done = pread(file, to, size, at)) <= 0) {
            if (done < 0 && errno == EINTR) { done = 0; continue; }
            return IO_ERROR;
        }
    return 0;
}

/* A reader asks for the moves of an index, then for its slot, copies, and asks whether it has lost the slot since. Whoever
   changes a slot counts first, also if it is killed in between. */
static uint32_t moves_of(const Store *s, int64_t i) {
    return s->spill == NONE ? 0 : __atomic_load_n(&s->warmth[i].moves, __ATOMIC_ACQUIRE);
}

static int has_lost(const Store *s, int64_t i, int64_t slot, uint32_t moves) {
    return slot != NONE && (__atomic_load_n(&s->rows[i].slot, __ATOMIC_ACQUIRE) != slot || moves_of(s, i) != moves);
}

static void set_slot(Store *s, int64_t i, int64_t slot) {
    Warmth *w = &s->warmth[i];
    __atomic_store_n(&w->moves, w->moves + 1, __ATOMIC_RELEASE);
    __atomic_store_n(&s->rows[i].slot, slot, __ATOMIC_RELEASE);
}

static int64_t spill_row(Store *s, const Row *r) {
    const int64_t slot = r->slot, length = r->length;
    if (!require(s, is_slot(s, slot) && length <= s->max_length)) return DAMAGED;
    for (int64_t c = 0; c < s->num_columns; c++) {
        const Column *column = &s->columns[c];
        if (write_all(s->spill, s->data + column->offset + slot * column->row_bytes,
                      (length + column->extra) * column->step_bytes, column->offset + (r - s->rows) * column->row_bytes)) return IO_ERROR;
    }
    return 0;
}

/* An epoch: EPOCH_READS reads of each index, on average. Its number counts modulo 256. */
static int64_t epoch_of(const Store *s) {
    return __atomic_load_n(&s->header->read, __ATOMIC_RELAXED) / (EPOCH_READS * s->capacity) & 255;
}

/* Reads of an index: those of this epoch, half of those of the last one, a quarter of those before it, ... */
static int64_t heat_of(const Store *s, int64_t i, int64_t epoch) {
    const uint16_t heat = __atomic_load_n(&s->warmth[i].heat, __ATOMIC_RELAXED);
    const int64_t age = (epoch - (heat >> 8)) & 255;
    return age < 8 ? (heat & 255) >> age : 0;
}

static void warm(const Store *s, int64_t i, int64_t epoch) {
    const int64_t heat = heat_of(s, i, epoch);
    __atomic_store_n(&s->warmth[i].heat, epoch << 8 | (heat < MOST_HEAT ? heat + 1 : heat), __ATOMIC_RELAXED);
}

/* A slot for another row: a free one; else, of the next EXAMINED, that of the row that is read least, which without reads is
   the one that was given longest ago. NONE if all are being written, or the table of slots names no row. */
static int64_t coldest_slot(Store *s) {
    Header *h = s->header;
    const int64_t epoch = epoch_of(s);
    int64_t found = NONE, least = INT64_MAX, examined = 0;
    for (int64_t tried = 0; tried < s->slots && examined < EXAMINED && least; tried++) {
        const int64_t slot = (uint64_t)h->hand++ % (uint64_t)s->slots, other = s->slot_rows[slot];
        if (other == NONE) return slot;
        if (!require(s, is_local(s, other))) return NONE;
        const int64_t state = state_of(&s->rows[other]);
        if (state == WRITING) continue;
        const int64_t heat = state == COMMITTED ? heat_of(s, other, epoch) : 0;
        if (heat < least) least = heat, found = slot;
        examined++;
    }
    return found;
}

/* Take the blocks of a slot from the row that has them. A committed one is in the file afterwards. */
static int64_t vacate(Store *s, int64_t slot) {
    const int64_t other = s->slot_rows[slot];
    if (other == NONE) return 0;
    Row *r = &s->rows[other];
    Warmth *w = &s->warmth[other];
    const int64_t state = state_of(r);
    if (state != COMMITTED) set_tag(r, (r->tag >> 2) + 1, state); /* not readable any more */
    else if (w->filed != r->tag >> 2) { /* else the file has it since it was spilled before */
        if (spill_row(s, r)) return IO_ERROR;
        w->filed = r->tag >> 2, s->header->spilled++;
    }
    s->header->in_file += state == COMMITTED;
    /* Before the slot's next writer: a reader that sees new bytes sees that the row has left. */
    set_slot(s, other, NONE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    s->slot_rows[slot] = NONE;
    return 0;
}

/* Give an index blocks in memory. */
static int64_t give_slot(Store *s, int64_t i) {
    if (s->spill == NONE || s->rows[i].slot != NONE) return 0;
    const int64_t slot = coldest_slot(s);
    if (slot == NONE) return NO_SLOT;
    if (vacate(s, slot)) return IO_ERROR;
    s->slot_rows[slot] = i;
    set_slot(s, i, slot);
    return 0;
}

/* Take back rows that are being written. */
static void undo(Store *s, int64_t n, const int64_t *indices) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t local = indices[i] - s->base;
        Row *r = &s->rows[local];
        if (state_of(r) != WRITING) continue; /* named twice */
        unlink_writing(s, local);
        set_tag(r, r->tag >> 2, FREE);
        push_free(s, local);
    }
}

/* Whether n indices can be had, before anything is evicted for them. */
static int64_t check_room(Store *s, int64_t n) {
    Header *h = s->header;
    for (int attempt = 0; attempt < 2; attempt++) {
        const int64_t indices = h->free + h->count;
        if (n <= indices && n <= s->slots - h->writing) return 0;
        if (!attempt && !reap(s)) return n > indices ? ALL_WRITING : NO_SLOT;
    }
    return ALL_WRITING;
}

static int64_t allocate(Store *s, int64_t n, int64_t *indices) {
    Header *h = s->header;
    const uint64_t self = own_identity();
    int64_t got = 0, victims = 0, failed = self && self != UNKNOWN ? reserve_scratch(s, n) : NO_IDENTITY;
    if (!failed) failed = check_room(s, n);
    if (!failed && !admits(h, INSERT)) return LIMITED;
    const int64_t now = h->writers == NONE ? 0 : now_ns();
    while (got < n && !failed) {
        const int64_t evicted = h->evicted, index = obtain(s, now);
        if (index < 0) { failed = index; break; }
        Row *r = &s->rows[index];
        r->owner = self;
        /* Before it gets a slot, in which there are another row's bytes: a victim that was spilled is not read from there. */
        set_tag(r, (r->tag >> 2) + 1, WRITING);
        if ((failed = give_slot(s, index))) { /* the file cannot be written: a victim is lost */
            const int64_t lost = s->base + index;
            set_tag(r, r->tag >> 2, FREE);
            push_free(s, index);
            update_trees(s, 1, &lost);
            break;
        }
        link_writing(s, index);
        if (index >= h->high) h->high = index + 1;
        indices[got++] = s->base + index;
        if (h->evicted != evicted) { /* victims first, so that one update of the trees serves them */
            indices[got - 1] = indices[victims], indices[victims++] = s->base + index;
        }
    }
    update_trees(s, victims, indices);
    if (failed) { undo(s, got, indices); return failed; }
    /* The tags before the first byte of the blocks: a reader that copies new bytes then finds a new tag. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return n;
}

/* Reserve n indices for the calling process. All or none. */
int64_t replay_allocate(Store *s, int64_t n, int64_t *indices) {
    const int64_t failed = lock(s);
    return failed ? failed : unlock(s, allocate(s, n, indices));
}

static int64_t owned(Store *s, int64_t n, const int64_t *indices) {
    const uint64_t self = own_identity();
    for (int64_t i = 0; i < n; i++) {
        if (indices[i] < s->base || indices[i] >= s->base + s->capacity) return 0;
        const Row *r = &s->rows[indices[i] - s->base];
        if (state_of(r) != WRITING || r->owner != self) return 0;
    }
    return 1;
}

static int64_t commit(Store *s, int64_t n, const int64_t *indices, const int64_t *lengths, const double *priorities,
                      const int64_t *timestamps, int64_t clock_ns) {
    Header *h = s->header;
    Limit *l = limit_of(h);
    const uint64_t drawn = __atomic_load_n(&h->selected, __ATOMIC_RELAXED);
    const int64_t failed = reserve_scratch(s, n);
    if (failed) return failed;
    if (!owned(s, n, indices)) return NOT_OWNED;
    for (int64_t i = 0; i < n; i++) {
        const int64_t local = indices[i] - s->base;
        Row *r = &s->rows[local];
        if (state_of(r) != WRITING) continue; /* named twice */
        unlink_writing(s, local);
        r->length = lengths[i], r->priority = priorities[i], r->timestamp = timestamps ? timestamps[i] : clock_ns;
        r->sequence = ++h->sequence, r->sampled = 0, r->owner = drawn;
        if (s->spill != NONE) __atomic_store_n(&s->warmth[local].heat, 0, __ATOMIC_RELAXED);
        set_tag(r, r->tag >> 2, COMMITTED); /* publishes the blocks and the status */
        link_committed(s, h->newest, local);
        h->inserted++;
        if (l) __atomic_fetch_add(&l->inserts, 1, __ATOMIC_RELAXED);
    }
    update_trees(s, n, indices);
    return n;
}

/* Make rows that the calling process filled selectable. timestamps: NULL for clock_ns. */
int64_t replay_commit(Store *s, int64_t n, const int64_t *indices, const int64_t *lengths, const double *priorities,
                      const int64_t *timestamps, int64_t clock_ns) {
    const int64_t failed = lock(s);
    return failed ? failed : unlock(s, commit(s, n, indices, lengths, priorities, timestamps, clock_ns));
}

/* Give reserved indices back. */
int64_t replay_cancel(Store *s, int64_t n, const int64_t *indices) {
    const int64_t failed = lock(s);
    if (failed) return failed;
    if (!owned(s, n, indices)) return unlock(s, NOT_OWNED);
    undo(s, n, indices);
    return unlock(s, n);
}

/* memcpy, without a call for a single number. */
static void copy(uint8_t *to, const uint8_t *from, size_t size) {
    if (size == 4) memcpy(to, from, 4);
    else if (size == 8) memcpy(to, from, 8);
    else memcpy(to, from, size);
}

/* Allocate, copy and commit n rows. sources: for each column (n, steps + extra, step_bytes). A few bytes are copied under the
   lock: taking it a second time would cost more. Not those of a mapped file: others would wait for the disk. */
int64_t replay_insert(Store *s, int64_t n, int64_t steps, uint8_t *const *sources, const int64_t *lengths,
                      const double *priorities, const int64_t *timestamps, int64_t clock_ns, int64_t *indices, uint64_t *generations) {
    const int keeps_lock = !s->on_disk && n * s->columns->row_bytes <= FEW_BYTES;
    int64_t done = lock(s);
    if (done) return done;
    if ((done = allocate(s, n, indices)) < 0) return unlock(s, done);
    if (!keeps_lock) unlock(s, n);
    for (int64_t i = 0; i < n; i++) { /* a row's blocks are neighbours */
        const Row *r = &s->rows[indices[i] - s->base];
        const int64_t slot = r->slot;
        if (!require(s, is_slot(s, slot))) break;
        uint8_t *blocks = s->data + slot * s->columns->row_bytes;
        generations[i] = r->tag >> 2;
        for (int64_t c = 0; c < s->num_columns; c++) {
            const Column *column = &s->columns[c];
            copy(blocks + column->offset, sources[c] + i * (steps + column->extra) * column->step_bytes,
                 (lengths[i] + column->extra) * column->step_bytes);
        }
    }
    done = keeps_lock ? 0 : lock(s);
    if (!done) done = unlock(s, s->damaged ? DAMAGED : commit(s, n, indices, lengths, priorities, timestamps, clock_ns));
    /* Without the lock they cannot be given back: the next search for dead writers takes them. */
    for (int64_t i = 0; done < 0 && i < n; i++)
        __atomic_store_n(&s->rows[indices[i] - s->base].owner, NOBODY, __ATOMIC_RELEASE);
    return done;
}

/* ---- arrays of Python ------------------------------------------------------------------------------------------------- */

/* What is used of CPython's stable ABI (3.11), declared here since Python.h is not on every host. */
typedef struct {
    void *buf, *obj;
    ssize_t len, itemsize;
    int readonly, ndim;
    char *format;
    ssize_t *shape, *strides, *suboffsets;
    void *internal;
} Buffer;
enum { C_CONTIGUOUS = 0x38, WITH_FORMAT = 0x4 };
void *PyTuple_GetItem(void *, ssize_t);
int PyObject_GetBuffer(void *, Buffer *, int);
void PyBuffer_Release(Buffer *);
void PyErr_Clear(void);
extern struct { char unused; } _Py_NoneStruct;
void *PyEval_SaveThread(void);
void PyEval_RestoreThread(void *);

static void drop(int64_t n, Buffer *b) { while (n) PyBuffer_Release(&b[--n]); }

/* The memory of a tuple's n contiguous arrays, the last of which may be a None: an address of 0. Returns 0 where one is
   another thing; then Python raises what it has set. */
static int64_t hold(void *arrays, int64_t n, Buffer *b) {
    for (int64_t i = 0; i < n; i++) {
        void *array = PyTuple_GetItem(arrays, i);
        b[i] = (Buffer){0};
        if (array == &_Py_NoneStruct) continue; /* PyBuffer_Release passes by what is empty */
        if (!array || PyObject_GetBuffer(array, &b[i], C_CONTIGUOUS)) return drop(i, b), 0;
    }
    return 1;
}

/* What a column's array of single timesteps is: (n, *shape). format: NumPy's character of the type. */
typedef struct { int64_t format, ndim; const int64_t *shape; } Form;

static int fits(const Buffer *b, const Form *f, int64_t n) {
    if (b->ndim != f->ndim + 1 || b->shape[0] != n || !b->format || b->format[0] != f->format || b->format[1]) return 0;
    for (int64_t d = 0; d < f->ndim; d++) if (b->shape[d + 1] != f->shape[d]) return 0;
    return 1;
}

/* Of rows to be inserted; timestamps: NULL for now. */
typedef struct { const int64_t *lengths; const double *priorities; const int64_t *timestamps; } Statistics;

/* replay_insert of single timesteps: a tuple of arrays in the order of the columns, and arrays for the keys. Returns 0, and
   does nothing, if one does not fit its column as it is. Called with Python's lock, and works without it. */
int64_t replay_insert_arrays(Store *s, void *arrays, const Form *forms, int64_t n, const Statistics *of, void *indices, void *generations) {
    Buffer held[s->num_columns + 2];
    uint8_t *sources[s->num_columns];
    int64_t got = 0, result = 1;
    for (; result && got < s->num_columns + 2; got++) {
        const int64_t key = got - s->num_columns;
        void *array = key < 0 ? PyTuple_GetItem(arrays, got) : key ? generations : indices;
        if (PyObject_GetBuffer(array, &held[got], C_CONTIGUOUS | WITH_FORMAT)) { PyErr_Clear(); result = 0; break; }
        if (key < 0) result = fits(&held[got], &forms[got], n), sources[got] = held[got].buf;
    }
    if (result) {
        void *thread = PyEval_SaveThread();
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        result = replay_insert(s, n, 1, sources, of->lengths, of->priorities, of->timestamps, now.tv_sec * 1000000000ll + now.tv_nsec,
                               held[s->num_columns].buf, held[s->num_columns + 1].buf);
        PyEval_RestoreThread(thread);
    }
    while (got) PyBuffer_Release(&held[--got]);
    return result;
}

/* Take a row out of selection. Its blocks stay readable until the index is allocated again. */
static void retire(Store *s, int64_t i) {
    Row *r = &s->rows[i];
    unlink_committed(s, i);
    set_tag(r, r->tag >> 2, DELETED);
    push_free(s, i);
}

static int is_current(const Row *r, uint64_t generation) { return r->tag == (generation << 2 | COMMITTED); }

/* Take the lock for a request about n rows by global index. */
static int64_t lock_for(Store *s, int64_t n, const int64_t *indices) {
    for (int64_t i = 0; i < n; i++)
        if (indices[i] < s->base || indices[i] >= s->base + s->capacity) return FOREIGN;
    int64_t failed = lock(s);
    if (!failed && (failed = reserve_scratch(s, n))) unlock(s, 0);
    return failed;
}

/* Delete rows, except those of another generation. Returns how many. */
int64_t replay_delete(Store *s, int64_t n, const int64_t *indices, const uint64_t *generations) {
    const int64_t failed = lock_for(s, n, indices);
    int64_t done = 0;
    if (failed) return failed;
    for (int64_t i = 0; i < n; i++)
        if (is_current(&s->rows[indices[i] - s->base], generations[i])) retire(s, indices[i] - s->base), done++;
    s->header->deleted += done;
    update_trees(s, n, indices);
    return unlock(s, done);
}

/* Set priorities, except of rows of another generation. Returns how many. Powers are computed, and rows fetched from memory,
   before the lock is taken: meanwhile nobody else could draw. */
int64_t replay_update(Store *s, int64_t n, const int64_t *indices, const uint64_t *generations, const double *priorities) {
    const Tree *raises = 0;
    for (int64_t k = 0; k < s->num_trees; k++)
        if (s->trees[k].kind == PRIORITIES && s->trees[k].exponent != 1.0) raises = &s->trees[k];
    double *known = raises ? malloc(n * sizeof *known) : 0;
    for (int64_t i = 0; i < n; i++) {
        if (indices[i] < s->base || indices[i] >= s->base + s->capacity) return free(known), FOREIGN;
        __builtin_prefetch(&s->rows[indices[i] - s->base], 1);
        if (known) known[i] = raised(raises, priorities[i]);
    }
    const int64_t failed = lock_for(s, n, indices);
    int64_t done = 0;
    if (failed) return free(known), failed;
    for (int64_t i = 0; i < n; i++) {
        if (i + AHEAD < n) __builtin_prefetch(&s->rows[indices[i + AHEAD] - s->base], 1);
        Row *r = &s->rows[indices[i] - s->base];
        if (is_current(r, generations[i])) r->priority = priorities[i], done++;
        else if (known) known[i] = NAN;
    }
    for (int64_t k = 0; k < s->num_trees; k++)
        if (s->trees[k].kind == PRIORITIES || s->trees[k].kind == LEAST_PRIORITIES)
            update_tree(s, &s->trees[k], n, indices, &s->trees[k] == raises ? known : 0);
    free(known);
    return unlock(s, done);
}

/* ---- priorities of timesteps ------------------------------------------------------------------------------------------- */

/* Steps of rows, by weights of (capacity, length): in each the first step t with w_0 + .. + w_t > rest, and its weight. Where
   rounding left a rest as large as the sum, the last step that has a weight. */
int64_t replay_choose_steps(int64_t capacity, int64_t length, int64_t n, const int64_t *rows, const double *rest,
                            const double *weights, int64_t *steps, double *chosen) {
    for (int64_t i = 0; i < n; i++) {
        if (rows[i] < 0 || rows[i] >= capacity) return FOREIGN;
        __builtin_prefetch(&weights[rows[i] * length]);
    }
    for (int64_t i = 0; i < n; i++) {
        const double *w = &weights[rows[i] * length];
        double end = 0.0;
        int64_t found = 0;
        for (int64_t t = 0; t < length && end <= rest[i]; t++)
            if (w[t] > 0.0) end += w[t], found = t;
        steps[i] = found, chosen[i] = w[found];
    }
    return 0;
}

/* Set weights of steps to their priorities to the power of an exponent, and priorities of rows to the sums of their weights,
   except of rows of another generation. ``sums``: room for n numbers. */
int64_t replay_update_steps(Store *s, int64_t n, const int64_t *indices, const uint64_t *generations, const int64_t *steps,
                            const double *priorities, double exponent, double *weights, double *sums) {
    const double most = DBL_MAX / (double)s->max_length;
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = indices[i] - s->base;
        if (!is_local(s, row)) return FOREIGN;
        if (steps[i] < 0 || steps[i] >= s->max_length) return NO_STEP;
        __builtin_prefetch(&s->rows[row]);
        __builtin_prefetch(&weights[row * s->max_length], 1);
        sums[i] = priorities[i] > 0.0 ? pow(priorities[i], exponent) : 0.0;
        if (!(sums[i] <= most)) return TOO_LARGE;
    }
    for (int64_t i = 0; i < n; i++) {
        const Row *r = &s->rows[indices[i] - s->base];
        if (is_current(r, generations[i]) && steps[i] >= r->length) return NO_STEP;
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = indices[i] - s->base;
        if (is_current(&s->rows[row], generations[i])) weights[row * s->max_length + steps[i]] = sums[i];
    }
    for (int64_t i = 0; i < n; i++) {
        const double *w = &weights[(indices[i] - s->base) * s->max_length];
        sums[i] = 0.0;
        for (int64_t t = 0; t < s->max_length; t++) sums[i] += w[t];
    }
    return replay_update(s, n, indices, generations, sums);
}

/* ---- checkpoints ------------------------------------------------------------------------------------------------------ */

/* All that a checkpoint has besides blocks, at one instant: header, status table, free indices in the order of their use.
   Returns how many are free. */
int64_t replay_freeze(Store *s, Header *header, Row *rows, int32_t *queue) {
    const int64_t failed = lock(s);
    if (failed) return failed;
    const int64_t count = s->header->free;
    if (!require(s, count >= 0 && count <= s->capacity)) return unlock(s, DAMAGED);
    *header = *s->header;
    memcpy(rows, s->rows, s->capacity * sizeof *rows);
    for (int64_t k = 0, i = header->first_free; k < count; k++, i = rows[i].next) {
        if (!require(s, is_local(s, i))) return unlock(s, DAMAGED);
        queue[k] = i;
    }
    return unlock(s, count);
}

/* The steps of one row, column after column. slot: NONE reads them from the file of spilled rows. Returns bytes. */
static int64_t copy_row(const Store *s, int64_t row, int64_t slot, int64_t length, uint8_t *out) {
    int64_t bytes = 0;
    for (int64_t c = 0; c < s->num_columns; c++) {
        const Column *column = &s->columns[c];
        const int64_t size = (length + column->extra) * column->step_bytes;
        if (slot != NONE) memcpy(out + bytes, s->data + column->offset + slot * column->row_bytes, size);
        else if (read_all(s->spill, out + bytes, size, column->offset + row * column->row_bytes)) return IO_ERROR;
        bytes += size;
    }
    return bytes;
}

/* Copy the blocks of committed rows, one row after the other, by the protocol of replay_gather: no lock. A row that was
   overwritten before or during its copy takes no space: good[i] is 0. Returns bytes. */
int64_t replay_pack(const Store *s, int64_t n, const int64_t *indices, const uint64_t *generations, const int64_t *lengths,
                    uint8_t *out, uint8_t *good) {
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t local = indices[i] - s->base;
        if (local < 0 || local >= s->capacity) return FOREIGN;
        const Row *r = &s->rows[local];
        uint64_t tag = __atomic_load_n(&r->tag, __ATOMIC_ACQUIRE);
        good[i] = 0;
        if (tag >> 2 != generations[i] || (tag & 3) < COMMITTED) continue;
        const uint32_t moves = moves_of(s, local);
        const int64_t slot = __atomic_load_n(&r->slot, __ATOMIC_ACQUIRE);
        if (lengths[i] > s->max_length || !has_blocks(s, slot)) return DAMAGED;
        int64_t bytes = copy_row(s, local, slot, lengths[i], out + total);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (has_lost(s, local, slot, moves)) { /* spilled meanwhile: the file has it */
            bytes = copy_row(s, local, NONE, lengths[i], out + total);
            __atomic_thread_fence(__ATOMIC_ACQUIRE);
        }
        tag = __atomic_load_n(&r->tag, __ATOMIC_RELAXED);
        if (tag >> 2 != generations[i] || (tag & 3) < COMMITTED) continue;
        if (bytes < 0) return bytes;
        good[i] = 1, total += bytes;
    }
    return total;
}

/* The inverse, of the rows that begin at these bytes of ``packed``: into the slots that they will have, or into the file where
   that is NONE. The rows are not visible yet. */
int64_t replay_unpack(Store *s, int64_t n, const int64_t *indices, const int64_t *lengths, const int32_t *slots,
                      const int64_t *offsets, uint8_t *packed) {
    for (int64_t i = 0; i < n; i++) {
        uint8_t *from = packed + offsets[i];
        for (int64_t c = 0; c < s->num_columns; c++) {
            const Column *column = &s->columns[c];
            const int64_t size = (lengths[i] + column->extra) * column->step_bytes;
            if (slots[i] != NONE) memcpy(s->data + column->offset + slots[i] * column->row_bytes, from, size);
            else if (write_all(s->spill, from, size, column->offset + (indices[i] - s->base) * column->row_bytes)) return IO_ERROR;
            from += size;
        }
    }
    return n;
}

/* Replace the status table, the queue and the counters. Blocks are in their places already, or no row is committed. */
int64_t replay_thaw(Store *s, const Header *header, const Row *rows, const int32_t *queue) {
    Header *h = s->header;
    int64_t failed = lock(s), resident = 0;
    if (failed) return failed;
    reap(s);
    if (h->writing) return unlock(s, ALL_WRITING);
    for (int64_t i = 0; i < s->capacity; i++) {
        Row *r = &s->rows[i];
        /* If this process is killed in between, the row is free: whoever rebuilds believes the tag. */
        set_tag(r, r->tag >> 2, FREE);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        resident += rows[i].slot != NONE;
        r->priority = rows[i].priority, r->timestamp = rows[i].timestamp, r->sequence = rows[i].sequence;
        r->length = rows[i].length, r->sampled = rows[i].sampled, r->owner = header->selected;
        __atomic_store_n(&r->slot, rows[i].slot, __ATOMIC_RELEASE);
        set_tag(r, rows[i].tag >> 2, rows[i].tag & 3);
        if (s->spill != NONE) {
            Warmth *w = &s->warmth[i];
            w->filed = rows[i].slot == NONE && (rows[i].tag & 3) == COMMITTED ? rows[i].tag >> 2 : 0;
            w->heat = 0, w->moves++;
        }
    }
    h->sequence = 0, h->thawed++;
    if ((failed = rebuild(s))) return failed; /* with the lock, as after a death: another process rebuilds */
    const int64_t count = h->free;
    h->free = 0, h->first_free = h->last_free = NONE;
    for (int64_t k = 0; k < count; k++)
        if (require(s, is_local(s, queue[k]) && is_free(s, queue[k]))) push_free(s, queue[k]);
    h->sequence = header->sequence, h->random = header->random;
    h->hand = resident; /* slots were given in order, from 0 */
    h->inserted = header->inserted, h->selected = header->selected, h->evicted = header->evicted;
    h->deleted = header->deleted, h->reclaimed = header->reclaimed;
    h->spilled = header->spilled, h->recovered = header->recovered;
    return unlock(s, h->count);
}

/* ---- selection -------------------------------------------------------------------------------------------------------- */

/* Philox4x64-10 (Salmon et al. 2011): number i of a draw, the same wherever it is computed. As NumPy's Philox with key
   (seed, stream) and counter (0, 0, round, draw). */
static void philox(uint64_t seed, uint64_t stream, uint64_t block, uint64_t round, uint64_t draw, uint64_t c[4]) {
    uint64_t key0 = seed, key1 = stream;
    c[0] = block, c[1] = 0, c[2] = round, c[3] = draw;
    for (int r = 0; r < 10; r++) {
        const __uint128_t x = (__uint128_t)0xD2E7470EE14C6C93ull * c[0], y = (__uint128_t)0xCA5A826395121157ull * c[2];
        const uint64_t c1 = c[1], c3 = c[3];
        c[0] = (uint64_t)(y >> 64) ^ c1 ^ key0, c[1] = (uint64_t)y;
        c[2] = (uint64_t)(x >> 64) ^ c3 ^ key1, c[3] = (uint64_t)x;
        key0 += 0x9E3779B97F4A7C15ull, key1 += 0xBB67AE8584CAA73Bull;
    }
}

/* Uniform numbers ``first`` to first + n - 1 of a draw, in [0, 1). */
void replay_uniforms(uint64_t seed, uint64_t stream, uint64_t round, uint64_t draw, int64_t first, int64_t n, double *out) {
    uint64_t c[4] = {0};
    for (int64_t i = first; i < first + n; i++) {
        if (i == first || i % 4 == 0) philox(seed, stream, i / 4 + 1, round, draw, c);
        out[i - first] = (double)(c[i % 4] >> 11) * 0x1p-53;
    }
}

static int64_t bin_of(int64_t value) { return value <= 0 ? 0 : 64 - __builtin_clzll(value); }

/* Count n drawn rows, and enter OBSERVED of them, evenly spaced, into the histograms, each for those that it stands for.
   accepted: NULL if all count. */
static void count_draws(Store *s, int64_t n, int64_t good, const int64_t *indices, const uint8_t *accepted) {
    Header *h = s->header;
    Limit *l = limit_of(h);
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    const int64_t now = t.tv_sec * 1000000000ll + t.tv_nsec, drawn = __atomic_fetch_add(&h->selected, good, __ATOMIC_RELAXED);
    for (int64_t k = 0, some = n < OBSERVED ? n : OBSERVED; k < some; k++) {
        const int64_t i = k * n / some, stands_for = (k + 1) * n / some - i;
        if (accepted && !accepted[i]) continue;
        const Row *r = &s->rows[indices[i] - s->base];
        __atomic_fetch_add(&h->ages[bin_of(now - r->timestamp)], stands_for, __ATOMIC_RELAXED);
        __atomic_fetch_add(&h->staleness[bin_of(drawn - (int64_t)r->owner)], stands_for, __ATOMIC_RELAXED);
    }
    if (l) __atomic_fetch_add(&l->samples, good, __ATOMIC_RELAXED);
}

/* Count selections. accepted: 0 where the row is gone, or was selected max_sampled times before. Returns how many are 1. */
static int64_t mark(Store *s, int64_t n, const int64_t *indices, const uint64_t *generations, uint8_t *accepted) {
    Header *h = s->header;
    int64_t retired = 0, good = 0;
    for (int64_t i = 0; i < n; i++) {
        Row *r = &s->rows[indices[i] - s->base];
        good += accepted[i] = is_current(r, generations[i]);
        if (accepted[i] && __atomic_add_fetch(&r->sampled, 1, __ATOMIC_RELAXED) == (uint64_t)h->max_sampled) retire(s, indices[i] - s->base), retired++;
    }
    count_draws(s, n, good, indices, accepted);
    if (retired) update_trees(s, n, indices);
    return good;
}

/* What a draw finds, by draw. */
typedef struct {
    double *rest;          /* of the target within its leaf */
    int64_t *indices;      /* global */
    uint64_t *generations;
    int64_t *lengths;
    double *weights;
    double *total;         /* of the tree, once */
    uint8_t *accepted;     /* as of mark() */
} Drawn;

/* Targets u * total of uniform numbers u, below the total. A subnormal total is a whole number of DBL_TRUE_MIN = 2^-1074, and
   so are the sums in it: the target is the product's whole part, since rounding to the nearest would favour the last rows. */
static void to_targets(int64_t n, double total, double *u) {
    const double most = nextafter(total, 0.0), units = ldexp(total, 1074);
    for (int64_t i = 0; i < n; i++) {
        const double target = total < DBL_MIN ? ldexp(floor(u[i] * units), -1074) : u[i] * total;
        u[i] = target < most ? target : most;
    }
}

/* One draw of targets u, from sums that are not changed meanwhile or checked for it afterwards. Returns whether there is a
   positive, finite sum. */
static int draw_rows(const Store *s, const Tree *t, int64_t n, const Drawn *d) {
    double *u = d->rest;
    const double total = *d->total = total_of(t);
    if (!(total > 0.0 && total < INFINITY)) return 0;
    to_targets(n, total, u);
    if (t->kind == ROWS && s->base == 0 && s->header->count == s->header->high)
        /* Every index is committed: the tree would return the target's whole part. */
        for (int64_t i = 0; i < n; i++) d->indices[i] = within(t, 0, (int64_t)u[i]), u[i] -= (double)d->indices[i];
    else replay_tree_draw(t, n, u, d->indices);
    for (int64_t i = 0; i < n; i++) {
        if (i + CHUNK < n) __builtin_prefetch(&s->rows[d->indices[i + CHUNK] - s->base], 1);
        const Row *r = &s->rows[d->indices[i] - s->base];
        d->generations[i] = r->tag >> 2, d->lengths[i] = r->length;
        d->weights[i] = has_bits(t) ? 1.0 : *node(t, 0, d->indices[i]);
    }
    return 1;
}

/* The version of the sums, once nobody changes them: even; or odd if that takes long. */
static uint64_t settled(const Header *h) {
    uint64_t version = __atomic_load_n(&h->version, __ATOMIC_ACQUIRE);
    for (int yields = 0; yields < YIELDS && version & 1; yields++) {
        sched_yield();
        version = __atomic_load_n(&h->version, __ATOMIC_ACQUIRE);
    }
    return version;
}

/* n targets u * total of a tree, u being the uniform numbers of this draw, and the rows that hold them, counted as selected.
   Returns how many are accepted.

   As a seqlock: without the lock, so that samplers never stop writers; with it if writers are faster, or if rows may be used
   up by being selected. */
static int64_t replay_draw(Store *s, int64_t tree, int64_t n, uint64_t seed, uint64_t stream, uint64_t round, uint64_t draw,
                           const Drawn *d) {
    const Tree *t = &s->trees[tree];
    for (int attempt = 0; attempt < ATTEMPTS && !s->header->max_sampled; attempt++) {
        const uint64_t version = settled(s->header);
        if (version & 1) break;
        replay_uniforms(seed, stream, round, draw, 0, n, d->rest);
        const int some = draw_rows(s, t, n, d);
        __atomic_thread_fence(__ATOMIC_ACQUIRE); /* the reads above before the next */
        if (__atomic_load_n(&s->header->version, __ATOMIC_RELAXED) != version) continue;
        if (!some) return EMPTY;
        /* A row that is overwritten at this moment may get a count too many. */
        for (int64_t i = 0; i < n; i++) __atomic_fetch_add(&s->rows[d->indices[i] - s->base].sampled, 1, __ATOMIC_RELAXED);
        count_draws(s, n, n, d->indices, 0);
        if (s->header->limit) notify(s->header, INSERT);
        return n;
    }
    int64_t failed = lock(s);
    if (failed) return failed;
    if ((failed = reserve_scratch(s, n))) return unlock(s, failed);
    replay_uniforms(seed, stream, round, draw, 0, n, d->rest);
    if (!draw_rows(s, t, n, d)) return unlock(s, EMPTY);
    return unlock(s, mark(s, n, d->indices, d->generations, d->accepted));
}

/* How often the rows of a tree can still be drawn together before max_sampled removes them all; counting ends at ``most``.
   Without the lock, so it may be a moment old. */
int64_t replay_draws_left(const Store *s, int64_t tree, int64_t most) {
    const Header *h = s->header;
    const Tree *t = &s->trees[tree];
    const int64_t end = s->base + s->capacity;
    int64_t left = h->max_sampled ? 0 : most, next;
    for (int64_t i = s->base; i < end && left < most; i = next) {
        /* Past the largest group that has i and no weight: rows that are gone cost nothing, however many there are. */
        int64_t l = 0;
        while (l < t->levels && !(value_of(t, l, i >> 3 * l) > 0.0)) l++;
        next = l ? ((i >> 3 * (l - 1)) + 1) << 3 * (l - 1) : i + 1;
        if (l) continue;
        const int64_t sampled = (int64_t)__atomic_load_n(&s->rows[i - s->base].sampled, __ATOMIC_RELAXED);
        if (sampled < h->max_sampled) left += h->max_sampled - sampled;
    }
    return left < most ? left : most;
}

/* replay_draw into the arrays of a tuple: those of Drawn, in the order of rows.Drawn. Called with Python's lock, and works
   without it. */
int64_t replay_draw_arrays(Store *s, int64_t tree, uint64_t seed, uint64_t stream, uint64_t round, uint64_t draw, void *arrays) {
    enum { INDICES, GENERATIONS, LENGTHS, WEIGHTS, REST, TOTAL, ACCEPTED, ARRAYS };
    Buffer b[ARRAYS];
    if (!hold(arrays, ARRAYS, b)) return NO_MEMORY;
    const Drawn d = {.rest = b[REST].buf, .indices = b[INDICES].buf, .generations = b[GENERATIONS].buf, .lengths = b[LENGTHS].buf,
                     .weights = b[WEIGHTS].buf, .total = b[TOTAL].buf, .accepted = b[ACCEPTED].buf};
    void *thread = PyEval_SaveThread();
    const int64_t result = replay_draw(s, tree, b[INDICES].shape[0], seed, stream, round, draw, &d);
    PyEval_RestoreThread(thread);
    drop(ARRAYS, b);
    return result;
}

/* Count selections. accepted: as of mark(). */
int64_t replay_mark(Store *s, int64_t n, const int64_t *indices, const uint64_t *generations, uint8_t *accepted) {
    const int64_t failed = lock_for(s, n, indices);
    return failed ? failed : unlock(s, mark(s, n, indices, generations, accepted));
}

/* Put n committed rows, whose local indices ``scratch`` has, back into the list of all, which is by sequence. */
static void relink(Store *s, int64_t n) {
    int64_t at = s->header->newest, seen = 0;
    qsort_r(s->scratch, n, sizeof *s->scratch, by_sequence, s->rows);
    while (n--) { /* one pass for all: from the newest row on, each behind the first that is older */
        const int64_t i = s->scratch[n];
        while (at != NONE && require(s, seen++ <= s->capacity) && has_state(s, at, COMMITTED) &&
               s->rows[at].sequence > s->rows[i].sequence) at = s->rows[at].prev;
        if (s->damaged) return;
        link_committed(s, at, i);
    }
}

/* Take counts of mark() back: of selections that nobody gets. A row that they used up can be selected again, unless a writer
   has taken its index since. The histograms keep them. Returns how many rows returned. */
int64_t replay_unmark(Store *s, int64_t n, const int64_t *indices, const uint64_t *generations) {
    Header *h = s->header;
    const int64_t failed = lock_for(s, n, indices);
    int64_t back = 0;
    if (failed) return failed;
    Limit *l = limit_of(h);
    for (int64_t i = 0; i < n; i++) {
        const int64_t local = indices[i] - s->base;
        Row *r = &s->rows[local];
        if (r->tag >> 2 != generations[i] || state_of(r) < COMMITTED || !r->sampled) continue; /* overwritten */
        /* Only the last of max_sampled selections leaves such a row: one that was deleted before has fewer, and stays so. */
        const int used_up = state_of(r) == DELETED && r->sampled == (uint64_t)h->max_sampled;
        __atomic_fetch_sub(&r->sampled, 1, __ATOMIC_RELAXED);
        if (!used_up) continue;
        unlink_free(s, local);
        set_tag(r, r->tag >> 2, COMMITTED);
        s->scratch[back++] = local;
    }
    relink(s, back);
    __atomic_fetch_sub(&h->selected, n, __ATOMIC_RELAXED);
    if (l) __atomic_fetch_sub(&l->samples, n, __ATOMIC_RELAXED);
    if (back) update_trees(s, n, indices);
    return unlock(s, back);
}

/* A consistent copy of the status table. */
int64_t replay_snapshot(Store *s, Row *out) {
    const int64_t failed = lock(s);
    if (failed) return failed;
    memcpy(out, s->rows, s->capacity * sizeof *out);
    return unlock(s, s->capacity);
}

/* The status table and a tree's leaves at one moment. */
int64_t replay_leaves(Store *s, int64_t tree, Row *rows, double *leaves) {
    const int64_t failed = lock(s);
    if (failed) return failed;
    memcpy(rows, s->rows, s->capacity * sizeof *rows);
    for (int64_t i = 0; i < s->capacity; i++) leaves[i] = value_of(&s->trees[tree], 0, s->base + i);
    return unlock(s, s->capacity);
}

/* Times selected of committed rows, in bins as of Header.ages: out (BINS). Of at most ``most`` indices, evenly spaced; without
   the lock, so counts may be a moment old. Returns how many rows were counted. */
int64_t replay_times_sampled(const Store *s, int64_t most, int64_t *out) {
    int64_t counted = 0;
    const int64_t used = s->header->high, high = used < s->capacity ? used : s->capacity, some = high < most ? high : most;
    memset(out, 0, BINS * sizeof *out);
    for (int64_t k = 0; k < some; k++) {
        const Row *r = &s->rows[k * high / some];
        if (state_of(r) != COMMITTED) continue;
        out[bin_of((int64_t)__atomic_load_n(&r->sampled, __ATOMIC_RELAXED))]++, counted++;
    }
    return counted;
}

/* The children of the first and the last node of each level from 1 on, at one moment: out (levels, 2, FANOUT). What a shard
   and its neighbours share are only these nodes. */
int64_t replay_edges(Store *s, int64_t tree, double *out) {
    const Tree *t = &s->trees[tree];
    double room[FANOUT];
    const int64_t failed = lock(s);
    if (failed) return failed;
    for (int64_t l = 1; l < t->levels; l++)
        for (int last = 0; last < 2; last++)
            memcpy(out + (2 * l + last) * FANOUT, children(t, l - 1, t->first[l] + last * (t->nodes[l] - 1), room), sizeof room);
    return unlock(s, t->levels);
}

/* Leaves below nodes of the shard's own that hold the targets, with generation, length and weight of their rows. */
int64_t replay_descend(Store *s, int64_t tree, int64_t n, const int64_t *level, const int64_t *from, double *targets,
                       int64_t *indices, uint64_t *generations, int64_t *lengths, double *weights) {
    const Tree *t = &s->trees[tree];
    const int64_t failed = lock(s);
    if (failed) return failed;
    replay_tree_descend(t, n, level, from, targets, indices);
    for (int64_t i = 0; i < n; i++) {
        const Row *r = &s->rows[indices[i] - s->base];
        generations[i] = r->tag >> 2, lengths[i] = r->length, weights[i] = value_of(t, 0, indices[i]);
    }
    return unlock(s, n);
}

/* Delete the row that a user's policy chose. Returns 0 if it is not selectable any more. */
int64_t replay_evict(Store *s, int64_t index, uint64_t generation) {
    const int64_t failed = lock_for(s, 1, &index);
    int64_t done = 0;
    if (failed) return failed;
    if (is_current(&s->rows[index - s->base], generation)) {
        retire(s, index - s->base);
        update_trees(s, 1, &index);
        s->header->evicted += done = 1;
    }
    return unlock(s, done);
}

/* 0 if this process cannot be identified: no /proc. */
uint64_t replay_identity(void) { return own_identity(); }

/* ---- collection ------------------------------------------------------------------------------------------------------- */

/* One window: steps max(0, t + offset) to min(t + offset + length, trajectory length), and zeros around them. */
static int64_t collect(const Store *s, const Part *p, int64_t row, int64_t slot, int64_t trajectory, int64_t t, int64_t i) {
    const Column *column = &s->columns[p->column];
    const int64_t from = t + p->offset, step = column->step_bytes;
    if (trajectory) trajectory += column->extra;
    int64_t begin = from > 0 ? from : 0, end = from + p->length < trajectory ? from + p->length : trajectory;
    if (end < begin) end = begin;
    const int64_t size = end - begin;
    /* Where the first step goes: at its place in the window, at the end (padding at the head), or at the begin. */
    int64_t at = p->padding == IN_PLACE ? begin - from : p->padding == HEAD ? p->length - size : 0;
    if (!size) at = 0;
    uint8_t *out = p->out + i * p->length * step;
    if (size < p->length) {
        memset(out, 0, at * step);
        memset(out + (at + size) * step, 0, (p->length - at - size) * step);
    }
    memset(p->mask + i * p->length, 0, p->length);
    memset(p->mask + i * p->length + at, 1, size);
    if (slot != NONE) memcpy(out + at * step, s->data + column->offset + slot * column->row_bytes + begin * step, size * step);
    else if (size) return read_all(s->spill, out + at * step, size * step,
                                   column->offset + row * column->row_bytes + begin * step);
    return 0;
}

/* Start to bring these bytes into the cache; of more than FETCHED, the first: the processor fetches the rest on its own. */
__attribute__((always_inline)) static inline void fetch(const uint8_t *from, int64_t bytes) {
    for (int64_t k = 0; k < bytes && k < FETCHED; k += LINE) __builtin_prefetch(from + k);
}

/* A chunk of rows, as their status was before the copy: where they are, and where they go. */
typedef struct {
    int64_t n, index[CHUNK], slot[CHUNK], length[CHUNK], step[CHUNK], at[CHUNK];
    uint64_t tag[CHUNK];
    int64_t first_step, steps_left; /* the least step, and the least number of steps from one to the end of its trajectory */
    int64_t is_simple, is_gapless;  /* 1: all are valid and in memory; they go to neighbouring places */
} Chunk;

/* The windows of one part for a chunk of rows. ``bytes``: of a window, a constant where the compiler is to copy without a
   call. Windows that lie within their trajectory, and in memory, are the rule: of a chunk that has no others none is checked. */
__attribute__((always_inline)) static inline int64_t collect_chunk(const Store *s, const Part *p, const Chunk *c, const int64_t bytes) {
    const Column *column = &s->columns[p->column];
    const int64_t block = column->row_bytes, step_bytes = column->step_bytes, length = p->length, n = c->n;
    const uint8_t *base = s->data + column->offset + p->offset * step_bytes;
    uint8_t *out = p->out, *mask = p->mask;
    int64_t failed = 0;
    if (c->is_simple && c->first_step + p->offset >= 0 && p->offset + length <= c->steps_left + column->extra) {
        for (int64_t i = 0; i < n; i++) {
            if (i + AHEAD < n) fetch(base + c->slot[i + AHEAD] * block + c->step[i + AHEAD] * step_bytes, bytes);
            memcpy(out + c->at[i] * bytes, base + c->slot[i] * block + c->step[i] * step_bytes, bytes);
        }
        const int64_t run = c->is_gapless ? n : 1;
        for (int64_t i = 0; i < n; i += run) memset(mask + c->at[i] * length, 1, run * length);
        return 0;
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = c->at[i], from = c->step[i] + p->offset;
        if (i + AHEAD < n && c->slot[i + AHEAD] != NONE) fetch(base + c->slot[i + AHEAD] * block + c->step[i + AHEAD] * step_bytes, bytes);
        if (from >= 0 && c->length[i] && from + length <= c->length[i] + column->extra && c->slot[i] != NONE) {
            memcpy(out + at * bytes, base + c->slot[i] * block + c->step[i] * step_bytes, bytes);
            memset(mask + at * length, 1, length);
        } else failed |= collect(s, p, c->index[i], c->slot[i], c->length[i], c->step[i], at);
    }
    return failed;
}

/* Bring a spilled row back into memory, if it is read more often than one there. ``blocks``: of ``copy_row``, of so many
   timesteps. With the lock. */
static void promote(Store *s, int64_t i, uint64_t generation, int64_t epoch, int64_t length, const uint8_t *blocks) {
    Row *r = &s->rows[i];
    if (!is_current(r, generation) || r->slot != NONE) return;
    const int64_t slot = coldest_slot(s), other = slot == NONE ? NONE : s->slot_rows[slot];
    if (slot == NONE) return;
    if (other != NONE && state_of(&s->rows[other]) == COMMITTED &&
        heat_of(s, i, epoch) < 2 * heat_of(s, other, epoch) + MARGIN) return;
    if (vacate(s, slot)) return; /* a full disk: the row stays where it is */
    for (int64_t c = 0; c < s->num_columns; c++) {
        const Column *column = &s->columns[c];
        const int64_t size = (length + column->extra) * column->step_bytes;
        memcpy(s->data + column->offset + slot * column->row_bytes, blocks, size);
        blocks += size;
    }
    s->slot_rows[slot] = i;
    set_slot(s, i, slot); /* publishes the blocks */
    s->header->promoted++, s->header->in_file--;
}

/* Count the reads of these rows, and bring some of those that were read from the file back. The file is read without the
   lock; if that is taken at the moment, the row has another chance at its next read. */
static void promote_read(Store *s, int64_t n, const int64_t *rows, const int64_t *slots, const int64_t *at,
                         const uint64_t *generations, const uint8_t *valid) {
    const int64_t epoch = epoch_of(s);
    int64_t read = 0, from_file = 0, tried = 0;
    uint8_t *blocks = 0;
    for (int64_t i = 0; i < n; i++) {
        if (valid[at[i]] != VALID) continue;
        read++, from_file += slots[i] == NONE;
        warm(s, rows[i], epoch);
        if (slots[i] != NONE || tried == MOST_PROMOTED || heat_of(s, rows[i], epoch) < MARGIN) continue;
        const Row *r = &s->rows[rows[i]];
        if (!blocks && !(blocks = malloc(s->columns[0].row_bytes))) break; /* of a whole row */
        tried++;
        const int64_t length = r->length;
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (!is_current(r, generations[at[i]]) || length > s->max_length) continue; /* the length may be another row's */
        if (copy_row(s, rows[i], NONE, length, blocks) < 0) continue;
        const int error = pthread_mutex_trylock(s->lock);
        if (error == EBUSY || enter(s, error)) continue;
        promote(s, rows[i], generations[at[i]], epoch, length, blocks);
        unlock(s, 0);
    }
    free(blocks);
    __atomic_fetch_add(&s->header->read, read, __ATOMIC_RELAXED);
    __atomic_fetch_add(&s->header->read_from_file, from_file, __ATOMIC_RELAXED);
}

/* Copy windows of selected rows into the parts' outputs: of rows where[begin] to where[end - 1] of the batch, or of begin to
   end - 1 if ``where`` is NULL. The others belong to other shards.

   valid[i]: VALID; STALE if the row was overwritten, before or during the copy; OUTSIDE if it has no such timestep. Returns
   how many are not VALID. */
int64_t replay_gather(Store *s, int64_t begin, int64_t end, const int64_t *indices, const uint64_t *generations,
                      const int64_t *steps, int64_t num_parts, const Part *parts, uint8_t *valid, const int64_t *where) {
    const Row *rows = s->rows;
    const int64_t spills = s->spill != NONE, row_bytes = num_parts ? s->columns->row_bytes : 0;
    int64_t failed = 0, bad = 0, damaged = 0;
    uint32_t moves[CHUNK] = {0};
    Chunk c;
    for (int64_t first = begin; first < end; first += CHUNK) {
        const int64_t n = c.n = end - first < CHUNK ? end - first : CHUNK;
        for (int64_t i = 0; i < n; i++) {
            c.at[i] = where ? where[first + i] : first + i;
            c.index[i] = indices[c.at[i]] - s->base, c.step[i] = steps[c.at[i]];
            if (!is_local(s, c.index[i])) return FOREIGN;
        }
        /* 1. Status. ACQUIRE: the blocks' bytes, and the length, are at least as new as the tag. */
        c.first_step = c.steps_left = INT64_MAX, c.is_simple = 1, c.is_gapless = !where;
        for (int64_t i = 0; i < n; i++) {
            const int64_t at = c.at[i], local = c.index[i];
            const int64_t later = first + i + CHUNK;
            if (later < end) __builtin_prefetch(&rows[indices[where ? where[later] : later] - s->base]);
            const Row *r = &rows[local];
            const uint64_t tag = c.tag[i] = __atomic_load_n(&r->tag, __ATOMIC_ACQUIRE);
            if (spills) moves[i] = moves_of(s, local);
            const int64_t length = r->length, slot = c.slot[i] = __atomic_load_n(&r->slot, __ATOMIC_ACQUIRE);
            if (row_bytes <= FETCHED && slot != NONE) fetch(s->data + slot * row_bytes, row_bytes + LINE);
            damaged |= length > s->max_length || !has_blocks(s, slot);
            const int good = (tag >> 2 == generations[at]) & ((tag & 3) >= COMMITTED);
            const int inside = (uint64_t)c.step[i] < (uint64_t)length;
            const int is_valid = good & inside;
            valid[at] = !good ? STALE : !inside ? OUTSIDE : VALID;
            /* Else the window is empty: zeros. A step may be any number. */
            c.length[i] = is_valid ? length : 0, c.step[i] = is_valid ? c.step[i] : 0;
            c.is_simple &= is_valid & (slot != NONE);
            const int64_t left = c.length[i] - c.step[i];
            c.first_step = c.step[i] < c.first_step ? c.step[i] : c.first_step;
            c.steps_left = left < c.steps_left ? left : c.steps_left;
        }
        if (damaged) return DAMAGED;
        /* 2. Copies, column by column. */
        for (int64_t k = 0; k < num_parts; k++) {
            const int64_t bytes = parts[k].length * s->columns[parts[k].column].step_bytes;
            const Part *p = &parts[k];
            failed |= bytes == 1    ? collect_chunk(s, p, &c, 1)
                      : bytes == 4  ? collect_chunk(s, p, &c, 4)
                      : bytes == 8  ? collect_chunk(s, p, &c, 8)
                      : bytes == 16 ? collect_chunk(s, p, &c, 16)
                      : bytes == 32 ? collect_chunk(s, p, &c, 32)
                                    : collect_chunk(s, p, &c, bytes);
        }
        /* 3. Status again. The fence keeps the copies before these loads. */
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        uint64_t changed = !c.is_simple | spills; /* of the rule, only whether a tag is another one */
        for (int64_t i = 0; i < n; i++) changed |= c.tag[i] ^ __atomic_load_n(&rows[c.index[i]].tag, __ATOMIC_RELAXED);
        for (int64_t i = 0; changed && i < n; i++) {
            const int64_t at = c.at[i], local = c.index[i];
            /* Spilled during the copy: the slot may hold another row by now, but the file has this one. */
            if (valid[at] == VALID && has_lost(s, local, c.slot[i], moves[i])) {
                for (int64_t k = 0; k < num_parts; k++)
                    failed |= collect(s, &parts[k], local, NONE, c.length[i], c.step[i], at);
                __atomic_thread_fence(__ATOMIC_ACQUIRE);
            }
            const uint64_t tag = __atomic_load_n(&rows[local].tag, __ATOMIC_RELAXED);
            /* Also of what was OUTSIDE: the length may have been the next row's. */
            if (!(tag >> 2 == generations[at] && (tag & 3) >= COMMITTED)) valid[at] = STALE;
            bad += valid[at] != VALID;
        }
        if (s->spill != NONE && !failed) promote_read(s, n, c.index, c.slot, c.at, generations, valid);
    }
    return failed ? IO_ERROR : bad;
}

/* replay_gather with the arrays of a tuple: indices, generations, steps, valid, and where or None. As of replay_draw_arrays. */
int64_t replay_gather_arrays(Store *s, int64_t begin, int64_t end, int64_t num_parts, const Part *parts, void *arrays) {
    enum { INDICES, GENERATIONS, STEPS, VALIDITY, WHERE, ARRAYS };
    Buffer b[ARRAYS];
    if (!hold(arrays, ARRAYS, b)) return NO_MEMORY;
    void *thread = PyEval_SaveThread();
    const int64_t bad = replay_gather(s, begin, end, b[INDICES].buf, b[GENERATIONS].buf, b[STEPS].buf, num_parts, parts, b[VALIDITY].buf, b[WHERE].buf);
    PyEval_RestoreThread(thread);
    drop(ARRAYS, b);
    return bad;
}

/* Ask the kernel to read the blocks of spilled rows ahead. Returns how many are spilled. */
int64_t replay_prefetch(const Store *s, int64_t n, const int64_t *indices) {
    int64_t spilled = 0;
    for (int64_t i = 0; i < n && s->spill != NONE; i++) {
        const int64_t local = indices[i] - s->base;
        if (local < 0 || local >= s->capacity) return FOREIGN;
        const Row *r = &s->rows[local];
        if (__atomic_load_n(&r->slot, __ATOMIC_ACQUIRE) != NONE || state_of(r) < COMMITTED) continue;
        spilled++;
        for (int64_t c = 0; c < s->num_columns; c++) {
            const Column *column = &s->columns[c];
            posix_fadvise(s->spill, column->offset + local * column->row_bytes,
                          (r->length + column->extra) * column->step_bytes, POSIX_FADV_WILLNEED);
        }
    }
    return spilled;
}
