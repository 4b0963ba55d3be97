/* WorldBatch of one model, each a row of state: loaded into a simulation, stepped and saved. Threads share them. */
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NONE_LEFT, ENOUGH, WARNED, FAILED };

typedef struct {
    void (*load)(const void *model, void *data, const double *row, int parts);
    void (*step)(const void *model, void *data);
    void (*forces)(const void *model, void *data);
    void (*save)(const void *model, void *data, double *row, int parts);
    const void *model;
    int64_t parts; /* of the state that a row holds */
    int64_t num_worlds, width;
    double *rows; /* (num_worlds, width) */
    int64_t num_fields;
    double *const *fields; /* (num_worlds, size) each: what follows from the state, copied out of the simulation */
    const int64_t *sizes;
    int64_t next; /* world that nobody has taken */
} WorldBatch;

/* One per thread. */
typedef struct {
    void *data;
    const double *const *fields;
    char *warnings; /* counts of each kind, int32: those of the world that was stepped last */
    int64_t kinds, stride;
    int64_t world; /* that was stepped last */
    char message[256];
} Simulation;

static _Thread_local jmp_buf *escape;
static _Thread_local Simulation *failing;
static void (*others)(const char *);

/* MuJoCo takes it that this does not return. */
static void leave(const char *message) {
    if (escape) {
        snprintf(failing->message, sizeof failing->message, "%s", message);
        longjmp(*escape, 1);
    }
    if (others) others(message);
    fprintf(stderr, "ERROR: %s\n", message);
    abort();
}

void rayagi_catch(void (**handler)(const char *)) {
    if (*handler == leave) return;
    others = *handler;
    *handler = leave;
}

static int32_t *count(const Simulation *s, int64_t kind) { return (int32_t *)(s->warnings + kind * s->stride); }

static int warned(const Simulation *s) {
    for (int64_t k = 0; k < s->kinds; k++)
        if (*count(s, k)) return 1;
    return 0;
}

/* Whether MuJoCo warned of it. */
static int step_world(const WorldBatch *w, Simulation *s, int64_t world, int64_t substeps) {
    double *row = w->rows + world * w->width;
    s->world = world;
    /* From zero: MuJoCo sets the counts to zero when it resets an unstable world, so a difference could be missed. */
    for (int64_t k = 0; k < s->kinds; k++) *count(s, k) = 0;
    w->load(w->model, s->data, row, (int)w->parts);
    for (int64_t i = 0; i < substeps; i++) w->step(w->model, s->data);
    w->forces(w->model, s->data);
    w->save(w->model, s->data, row, (int)w->parts);
    for (int64_t k = 0; k < w->num_fields; k++)
        memcpy(w->fields[k] + world * w->sizes[k], s->fields[k], w->sizes[k] * sizeof(double));
    return warned(s);
}

static int64_t step_worlds(WorldBatch *w, Simulation *s, int64_t substeps, int64_t most) {
    for (; most > 0; most--) {
        const int64_t world = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED);
        if (world >= w->num_worlds) return NONE_LEFT;
        if (step_world(w, s, world, substeps)) return WARNED;
    }
    return ENOUGH;
}

int64_t rayagi_step_worlds(WorldBatch *w, Simulation *s, int64_t substeps, int64_t most) {
    jmp_buf here;
    int64_t end;
    failing = s;
    escape = &here;
    if (setjmp(here))
        end = FAILED;
    else
        end = step_worlds(w, s, substeps, most);
    escape = NULL;
    return end;
}
