/* One sweep over the intervals of a window of time: for how long each set of categories is active in each cell.

   The reference is overlap_times in intervals.py. A lane is a list of disjoint ascending intervals, such as those of one
   thread. A heap holds the lanes by the time of their next boundary; each boundary changes one category of one cell, and
   only the time since that cell's last change is added up: t(cell, set) += now - since(cell). Cell number ``cells`` is all
   of them together. */
#include <stdint.h>
#include <string.h>

enum { BITS = 16 };

typedef struct { int64_t time, lane; } Next;

/* A sum of the open-addressing table. mask 0: the entry is free. */
typedef struct { int64_t cell, mask, ns; } Sum;

typedef struct {
    int64_t lanes, cells, table_size; /* table_size: a power of 2 */
    const int64_t *first;             /* (lanes + 1): where each lane's intervals begin */
    const int64_t *bits, *cell, *starts, *ends; /* of all intervals */
    int32_t *active;                  /* (cells + 1, BITS): lanes in which a category is active. 0 at first */
    int64_t *masks, *since;           /* (cells + 1): categories that are active, and the last change. 0 at first */
    int64_t *at;                      /* (lanes): interval of each lane, doubled, plus 1 while it is open */
    Next *heap;                       /* (lanes) */
    Sum *table;                       /* (table_size): 0 at first */
} Sweep;

static int add(const Sweep *s, int64_t cell, int64_t mask, int64_t ns) {
    uint64_t at = ((uint64_t)cell << BITS | (uint64_t)mask) * 0x9E3779B97F4A7C15ull >> 20;
    for (int64_t tried = 0; tried < s->table_size; tried++, at++) {
        Sum *sum = &s->table[at & (s->table_size - 1)];
        if (!sum->mask) sum->cell = cell, sum->mask = mask;
        if (sum->cell == cell && sum->mask == mask) { sum->ns += ns; return 1; }
    }
    return 0;
}

/* A category of a cell becomes active in one more lane (by 1) or one less (by -1). */
static int change(const Sweep *s, int64_t cell, int64_t bit, int by, int64_t now) {
    int32_t *count = &s->active[cell * BITS + bit];
    *count += by;
    if (*count != (by > 0)) return 1; /* the set is as before: others are active, too */
    const int64_t mask = s->masks[cell], ns = now - s->since[cell];
    s->masks[cell] = mask ^ 1ll << bit, s->since[cell] = now;
    return !mask || !ns || add(s, cell, mask, ns);
}

/* The next boundary of a lane becomes the heap's entry ``hole`` and sinks to its place. */
static void sink(Next *heap, int64_t size, int64_t hole, Next next) {
    for (int64_t child; (child = 2 * hole + 1) < size; hole = child) {
        if (child + 1 < size && heap[child + 1].time < heap[child].time) child++;
        if (heap[child].time >= next.time) break;
        heap[hole] = heap[child];
    }
    heap[hole] = next;
}

/* Returns 0 if the table is too small. */
int64_t overlap_sweep(const Sweep *s) {
    int64_t size = 0;
    for (int64_t l = 0; l < s->lanes; l++) {
        s->at[l] = 2 * s->first[l];
        if (s->first[l] < s->first[l + 1]) s->heap[size++] = (Next){s->starts[s->first[l]], l};
    }
    for (int64_t i = size / 2 - 1; i >= 0; i--) sink(s->heap, size, i, s->heap[i]);
    while (size) {
        const Next now = s->heap[0];
        const int64_t i = s->at[now.lane] >> 1, is_open = s->at[now.lane] & 1;
        if (s->ends[i] > s->starts[i]) { /* else it has no time */
            const int by = is_open ? -1 : 1;
            if (!change(s, s->cell[i], s->bits[i], by, now.time) || !change(s, s->cells, s->bits[i], by, now.time)) return 0;
        }
        const int64_t next = ++s->at[now.lane] >> 1;
        if (next == s->first[now.lane + 1]) {
            if (--size) sink(s->heap, size, 0, s->heap[size]);
        } else
            sink(s->heap, size, 0, (Next){is_open ? s->starts[next] : s->ends[next], now.lane});
    }
    return 1;
}
