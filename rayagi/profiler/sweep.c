/* One sweep over the intervals of a window of time: for how long each set of categories is active in each cell, for each
   process and for all of them together.

   The reference is overlap_by_process in intervals.py. A lane is a list of disjoint ascending intervals, such as those of one
   thread. A heap holds the lanes by the time of their next boundary; each boundary changes one category of one cell, and
   only the time since that cell's last change is added up: t(cell, set) += now - since(cell). A process has a row of state
   for each cell, and one more for all of its cells together; the last process is the union of the others. */
#include <stdint.h>
#include <string.h>

enum { BITS = 16 };

typedef struct { int64_t time, lane; } Next;

/* A sum of the open-addressing table. mask 0: the entry is free. */
typedef struct { int64_t row, mask, ns; } Sum;

typedef struct {
    int64_t lanes, processes, cells, table_size; /* processes: without the union; table_size: a power of 2 */
    const int64_t *process, *length;  /* (lanes): of which process, and how many intervals */
    const int64_t *const *bits, *const *cell, *const *starts, *const *ends; /* (lanes): arrays of each lane's intervals */
    int32_t *active;                  /* (rows, BITS): lanes in which a category is active. 0 at first */
    int64_t *masks, *since;           /* (rows): categories that are active, and the last change. 0 at first */
    int64_t *at;                      /* (lanes): interval of each lane, doubled, plus 1 while it is open */
    Next *heap;                       /* (lanes) */
    Sum *table;                       /* (table_size): 0 at first */
} Sweep;

static int add(const Sweep *s, int64_t row, int64_t mask, int64_t ns) {
    uint64_t at = ((uint64_t)row << BITS | (uint64_t)mask) * 0x9E3779B97F4A7C15ull >> 20;
    for (int64_t tried = 0; tried < s->table_size; tried++, at++) {
        Sum *sum = &s->table[at & (s->table_size - 1)];
        if (!sum->mask) sum->row = row, sum->mask = mask;
        if (sum->row == row && sum->mask == mask) { sum->ns += ns; return 1; }
    }
    return 0;
}

enum { NOTHING = -1 };

/* A lane leaves a category of a row and enters another one; either may be NOTHING. */
static int change(const Sweep *s, int64_t row, int64_t left, int64_t entered, int64_t now) {
    int32_t *active = &s->active[row * BITS];
    const int64_t before = s->masks[row], ns = now - s->since[row];
    int64_t mask = before;
    if (left >= 0 && !--active[left]) mask &= ~(1ll << left);
    if (entered >= 0 && !active[entered]++) mask |= 1ll << entered;
    if (mask == before) return 1; /* other lanes are active in them, too */
    s->masks[row] = mask, s->since[row] = now;
    return !before || !ns || add(s, row, before, ns);
}

/* The same for the rows of two intervals of a lane: their cells and all cells, of its process and of all processes. */
static int change_rows(const Sweep *s, int64_t lane, int64_t left, int64_t entered, int64_t now) {
    const int64_t *bits = s->bits[lane], *cell = s->cell[lane];
    const int64_t bit_left = left < 0 ? NOTHING : bits[left], bit_entered = entered < 0 ? NOTHING : bits[entered];
    const int64_t cell_left = left < 0 ? cell[entered] : cell[left], cell_entered = entered < 0 ? cell_left : cell[entered];
    for (int64_t process = s->process[lane];; process = s->processes) {
        const int64_t row = process * (s->cells + 1);
        if (!change(s, row + s->cells, bit_left, bit_entered, now)) return 0;
        if (cell_left == cell_entered) {
            if (!change(s, row + cell_left, bit_left, bit_entered, now)) return 0;
        } else if (!change(s, row + cell_left, bit_left, NOTHING, now) || !change(s, row + cell_entered, NOTHING, bit_entered, now))
            return 0;
        if (process == s->processes || s->processes == 1) return 1;
    }
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
        s->at[l] = 0;
        if (s->length[l]) s->heap[size++] = (Next){s->starts[l][0], l};
    }
    for (int64_t i = size / 2 - 1; i >= 0; i--) sink(s->heap, size, i, s->heap[i]);
    while (size) {
        const int64_t now = s->heap[0].time, lane = s->heap[0].lane, is_open = s->at[lane] & 1;
        const int64_t left = is_open ? s->at[lane] >> 1 : NOTHING, length = s->length[lane];
        const int64_t *starts = s->starts[lane], *ends = s->ends[lane];
        int64_t next = (s->at[lane] >> 1) + is_open;
        while (next < length && ends[next] <= starts[next]) next++; /* it has no time */
        /* An interval mostly begins where the one before it ends: one boundary for both. */
        const int64_t entered = next < length && starts[next] == now ? next : NOTHING;
        if ((left >= 0 || entered >= 0) && !change_rows(s, lane, left, entered, now)) return 0;
        s->at[lane] = 2 * next + (entered >= 0);
        if (next < length) sink(s->heap, size, 0, (Next){entered >= 0 ? ends[next] : starts[next], lane});
        else if (--size) sink(s->heap, size, 0, s->heap[size]);
    }
    return 1;
}
