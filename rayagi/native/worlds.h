/* Worlds of one MuJoCo model: loaded into an MjData, stepped and saved, one by one. Any number of threads share the work. */
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Why a call returned: all worlds are claimed; it has stepped as many as it may; MuJoCo warned of the last world; it
   refused to step it. */
enum { NONE_LEFT, LIMIT_REACHED, WARNED, FAILED };

/* Shared by all threads. Python fills it (worlds.py). */
typedef struct {
    /* MuJoCo's functions: mj_setState, mj_step, mj_rnePostConstraint, mj_getState. */
    void (*load)(const void *model, void *data, const double *row, int parts);
    void (*step)(const void *model, void *data);
    void (*forces)(const void *model, void *data);
    void (*save)(const void *model, void *data, double *row, int parts);
    const void *model;
    int64_t parts; /* mjtState bits of what a row holds */
    int64_t num_worlds, width;
    double *rows;  /* (num_worlds, width): state of each world. The thread that claimed a world writes its row and fields */
    int64_t num_fields;
    double *const *fields; /* (num_worlds, size) each: MjData fields derived from the state */
    const int64_t *sizes;
    int64_t next; /* first unclaimed world. Threads add atomically; Python sets it to 0 between steps */
} WorldBatch;

/* A thread's own MjData. */
typedef struct {
    void *data;
    const double *const *fields; /* in the MjData, as WorldBatch's */
    char *warnings;        /* int32 count of each kind of warning of the last world, ``stride`` bytes apart */
    int64_t kinds, stride;
    int64_t world;         /* stepped last */
    char message[256];     /* of MuJoCo's error, after FAILED */
} Simulation;

/* Where the error handler jumps to, and the simulation it reports to; NULL outside this program's calls. */
static _Thread_local jmp_buf *error_target;
static _Thread_local Simulation *current_simulation;
static void (*previous_handler)(const char *);

/* mju_user_error. MuJoCo expects that it does not return, so it jumps out of MuJoCo; other callers get their own handler. */
static void handle_error(const char *message) {
    if (error_target) {
        snprintf(current_simulation->message, sizeof current_simulation->message, "%s", message);
        longjmp(*error_target, 1);
    }
    if (previous_handler) previous_handler(message);
    fprintf(stderr, "ERROR: %s\n", message);
    abort();
}

/* ``handler``: the address of mju_user_error. */
void rayagi_install_error_handler(void (**handler)(const char *)) {
    if (*handler == handle_error) return;
    previous_handler = *handler;
    *handler = handle_error;
}

static int32_t *count(const Simulation *s, int64_t kind) { return (int32_t *)(s->warnings + kind * s->stride); }

static int warned(const Simulation *s) {
    for (int64_t k = 0; k < s->kinds; k++)
        if (*count(s, k)) return 1;
    return 0;
}

/* Step a world. Returns whether MuJoCo warned. */
static int step_world(const WorldBatch *w, Simulation *s, int64_t world, int64_t substeps) {
    double *row = w->rows + world * w->width;
    s->world = world;
    /* Reset the counts: MuJoCo zeroes them when it resets an unstable world, so a difference could miss a warning. */
    for (int64_t k = 0; k < s->kinds; k++) *count(s, k) = 0;
    /* Row -> MjData -> substeps -> row: only the thread that claimed the world touches its row and fields. */
    w->load(w->model, s->data, row, (int)w->parts);
    for (int64_t i = 0; i < substeps; i++) w->step(w->model, s->data);
    w->forces(w->model, s->data); /* cfrc_ext, which mj_step does not compute */
    w->save(w->model, s->data, row, (int)w->parts);
    for (int64_t k = 0; k < w->num_fields; k++)
        memcpy(w->fields[k] + world * w->sizes[k], s->fields[k], w->sizes[k] * sizeof(double));
    return warned(s);
}

/* Claim and step worlds. RELAXED: worlds are independent, so a claim only has to be atomic; Python joins the threads. */
static int64_t step_worlds(WorldBatch *w, Simulation *s, int64_t substeps, int64_t max_worlds) {
    for (; max_worlds > 0; max_worlds--) {
        const int64_t world = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED);
        if (world >= w->num_worlds) return NONE_LEFT;
        if (step_world(w, s, world, substeps)) return WARNED;
    }
    return LIMIT_REACHED;
}

int64_t rayagi_step_worlds(WorldBatch *w, Simulation *s, int64_t substeps, int64_t max_worlds) {
    jmp_buf here;
    int64_t end;
    current_simulation = s;
    error_target = &here;
    if (setjmp(here))
        end = FAILED;
    else
        end = step_worlds(w, s, substeps, max_worlds);
    error_target = NULL;
    return end;
}
