/* A rollout of worlds: a policy acts, worlds step, a task judges; T steps of N worlds without a look at Python but for what an
episode begins with. WorldBatch do not meet, so nobody waits for the slowest of a step: groups of worlds are taken in the order of
steps, and a group's next step needs only its last. After worlds.h. */
#include <math.h>
#include <sched.h>

enum { ENDED = FAILED + 1, UNFIT, PEER_WAITING };

typedef struct {
    const double *start;
    int64_t stride; /* from a world to the next, in numbers */
} Rows;

typedef struct {
    WorldBatch *worlds;
    int64_t substeps;
    /* The agent: acting.h's. */
    void (*act)(const void *policy, const void *acting, int64_t t, int64_t begin, int64_t end, const void *obs, int64_t stride,
                void *scratch);
    const void *policy, *acting;
    /* The task, of one world's fields. */
    double (*forward_position)(const double *const *fields);
    int (*compute_reward_done)(const double *const *fields, const double *controls, double speed, float *reward); /* terminated */
    void (*observe)(const double *const *fields, float *obs);
    int64_t num_fields;
    const Rows *fields;
    double dt;
    int64_t limit; /* steps of an episode */
    int64_t *elapsed;
    /* Actions and the box that they are clipped to. */
    int64_t num_actions;
    const double *low, *high;
    int64_t controls; /* where they are in a row of state */
    /* What is filled, (T, N, ...). */
    int64_t num_steps, obs_dim;
    float *obs; /* (N, obs_dim) to act on next */
    const float *actions;
    float *rewards;
    uint8_t *terminated, *truncated;
    float *final_obs; /* where an episode ended */
    /* Groups. */
    int64_t group; /* worlds */
    int64_t *done; /* (groups) steps made */
    int64_t next;  /* step and group that nobody has taken */
    int64_t stopped;
} Rollout;

/* Where a thread is. */
typedef struct {
    void *scratch; /* of the agent's */
    enum { IDLE, TO_STEP, TO_JUDGE, TO_BEGIN } stage;
    int64_t t, group, world, end;
    double before; /* the place of ``world`` before it stepped */
    int64_t unstable; /* whether ``world`` became unstable in this step: set by the caller after WARNED */
    /* Operations that this GMI has come to, and those that others have, who have not peer_waits their cores yet. */
    const int64_t *own;
    const int64_t *const *others;
    int64_t num_others;
} ThreadState;

/* Whether one of them has come to an operation before this GMI: it waits, and its cores are idle. */
static int peer_waits(const ThreadState *turn) {
    for (int64_t k = 0; k < turn->num_others; k++)
        if (__atomic_load_n(turn->others[k], __ATOMIC_RELAXED) > *turn->own) return 1;
    return 0;
}

static void fields_of(const Rollout *r, int64_t world, const double **fields) {
    for (int64_t k = 0; k < r->num_fields; k++) fields[k] = r->fields[k].start + world * r->fields[k].stride;
}

/* Actions to controls. Whether these are finite. */
static int control(const Rollout *r, int64_t t, int64_t world) {
    const float *action = r->actions + (t * r->worlds->num_worlds + world) * r->num_actions;
    double *controls = r->worlds->rows + world * r->worlds->width + r->controls;
    for (int64_t k = 0; k < r->num_actions; k++) {
        const double asked = action[k], low = r->low[k], high = r->high[k];
        controls[k] = asked < low ? low : asked > high ? high : asked;
        if (!isfinite(controls[k])) return 0;
    }
    return 1;
}

/* Whether the episode ended. */
static int compute_reward_done(const Rollout *r, int64_t t, int64_t world, const double *const *fields, double speed) {
    const int64_t at = t * r->worlds->num_worlds + world;
    const double *controls = r->worlds->rows + world * r->worlds->width + r->controls;
    float *obs = r->obs + world * r->obs_dim;
    r->terminated[at] = r->compute_reward_done(fields, controls, speed, r->rewards + at);
    r->truncated[at] = r->elapsed[world] >= r->limit;
    r->observe(fields, obs);
    if (!r->terminated[at] && !r->truncated[at]) return 0;
    memcpy(r->final_obs + at * r->obs_dim, obs, r->obs_dim * sizeof *obs);
    return 1;
}

/* An unstable world's episode ends without a reward, with the last observation that it had before. */
static void end_unstable(const Rollout *r, int64_t t, int64_t world) {
    const int64_t at = t * r->worlds->num_worlds + world;
    r->rewards[at] = 0.0f;
    r->terminated[at] = 1;
    r->truncated[at] = r->elapsed[world] >= r->limit;
    memcpy(r->final_obs + at * r->obs_dim, r->obs + world * r->obs_dim, r->obs_dim * sizeof *r->obs);
}

/* The next group, when its last step is made; else none is left. */
static int take(Rollout *r, ThreadState *turn) {
    const int64_t n = r->worlds->num_worlds, groups = (n + r->group - 1) / r->group;
    const int64_t place = __atomic_fetch_add(&r->next, 1, __ATOMIC_RELAXED);
    turn->t = place / groups;
    turn->group = place % groups;
    if (turn->t >= r->num_steps) return 0;
    while (__atomic_load_n(&r->done[turn->group], __ATOMIC_ACQUIRE) < turn->t) {
        if (__atomic_load_n(&r->stopped, __ATOMIC_RELAXED)) return 0;
        sched_yield();
    }
    turn->world = turn->group * r->group;
    turn->end = turn->world + r->group < n ? turn->world + r->group : n;
    return 1;
}

static int64_t roll(Rollout *r, Simulation *s, ThreadState *turn, int64_t most) {
    const double *fields[r->num_fields];
    for (;;) {
        if (turn->stage == IDLE) {
            if (most-- == 0) return ENOUGH;
            if (__atomic_load_n(&r->stopped, __ATOMIC_RELAXED) || !take(r, turn)) return NONE_LEFT;
            r->act(r->policy, r->acting, turn->t, turn->world, turn->end, r->obs, r->obs_dim * sizeof(float), turn->scratch);
            turn->stage = TO_STEP;
        }
        for (; turn->world < turn->end; turn->world++, turn->stage = TO_STEP) {
            const int64_t world = turn->world;
            fields_of(r, world, fields);
            if (turn->stage == TO_STEP) {
                if (peer_waits(turn)) return PEER_WAITING;
                s->world = world;
                r->elapsed[world]++;
                if (!control(r, turn->t, world)) return UNFIT;
                turn->before = r->forward_position(fields);
                turn->stage = TO_JUDGE;
                if (step_world(r->worlds, s, world, r->substeps)) return WARNED;
            }
            if (turn->stage == TO_JUDGE) {
                turn->stage = TO_BEGIN;
                if (turn->unstable) {
                    turn->unstable = 0;
                    end_unstable(r, turn->t, world);
                    return ENDED;
                }
                const double speed = (r->forward_position(fields) - turn->before) / r->dt;
                if (compute_reward_done(r, turn->t, world, fields, speed)) return ENDED;
            } else
                r->observe(fields, r->obs + world * r->obs_dim);
        }
        turn->stage = IDLE;
        __atomic_store_n(&r->done[turn->group], turn->t + 1, __ATOMIC_RELEASE);
    }
}

/* At most so many groups' steps, by this thread, or until others lend their cores. WARNED and ENDED are of ``s->world``; the next call goes on from there. */
int64_t rayagi_run_rollout(Rollout *r, Simulation *s, ThreadState *turn, int64_t most) {
    jmp_buf here;
    int64_t end;
    failing = s;
    escape = &here;
    if (setjmp(here))
        end = FAILED;
    else
        end = roll(r, s, turn, most);
    escape = NULL;
    return end;
}
