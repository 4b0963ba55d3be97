/* Whole rollouts: T steps of N worlds, with policy, physics, rewards and observations in C. Include it after worlds.h.

Worlds are independent, so no world waits for the slowest one of a step. Threads claim groups of worlds in the order of
steps; a group's next step needs only its own previous step. Python is called when an episode ends, to start the next
one. */
#include <math.h>
#include <sched.h>
#include <time.h>

/* Why a call returned, beside worlds.h's: the last world's episode ended; its action is not finite. */
enum { EPISODE_ENDED = FAILED + 1, ACTION_NOT_FINITE };

/* A field of all worlds. */
typedef struct {
    const double *start;
    int64_t stride; /* doubles from world to world */
} Rows;

/* One rollout, shared by all threads. Python fills it (program.py). A world's entries are written by the thread that
   has its group. */
typedef struct {
    WorldBatch *worlds;
    int64_t substeps;
    /* rayagi_act of acting.h, and its arguments. */
    void (*act)(const void *policy, const void *acting, int64_t t, int64_t begin, int64_t end, const void *obs, int64_t stride,
                void *scratch);
    const void *policy, *acting;
    /* The task's functions of one world's fields (formulas.py). */
    double (*forward_position)(const double *const *fields);
    /* Returns terminated. */
    int (*compute_reward_done)(const double *const *fields, const double *controls, double speed, float *reward);
    void (*observe)(const double *const *fields, float *obs);
    int64_t num_fields;
    const Rows *fields;
    double dt;        /* seconds per step */
    int64_t limit;    /* steps per episode */
    int64_t *elapsed; /* (N,): steps of the running episodes. Also written by Python, which sets 0 at an episode's start */
    /* Actions are clipped to this box. */
    int64_t num_actions;
    const double *low, *high;
    int64_t controls; /* index of the controls in a row of state */
    /* Outputs, (T, N, ...), but for obs and actions. */
    int64_t num_steps, obs_dim;
    float *obs;           /* (N, obs_dim): input of the next action */
    const float *actions; /* (T, N, num_actions): written by ``act`` */
    float *rewards;
    uint8_t *terminated, *truncated;
    float *final_obs;     /* only where an episode ended */
    /* Scheduling. */
    int64_t group;     /* worlds per group */
    int64_t *done;     /* (groups,): completed steps. Written by the thread that has the group, read by its next one */
    int64_t next;      /* first unclaimed item; item = step * groups + group. Threads add atomically */
    int64_t cancelled; /* 1: threads return. Written by Python */
} Rollout;

/* A thread's position in its group, so that a call continues where the previous one returned. */
typedef struct {
    void *scratch; /* of ``act`` */
    enum { NO_GROUP, STEP, REWARD, OBSERVE_START } stage; /* of ``world``: what comes next */
    int64_t t, group, world, end; /* step, group, current world, end of the group */
    double start_position;        /* forward_position before the step */
    int64_t unstable;             /* 1: ``world`` became unstable in this step. Set by Python after WARNED */
    int64_t *acting;              /* start and end of each ``act`` of this call, in ns of CLOCK_MONOTONIC; NULL: not wanted */
    int64_t acted;                /* number of these */
} ThreadState;

static void fields_of(const Rollout *r, int64_t world, const double **fields) {
    for (int64_t k = 0; k < r->num_fields; k++) fields[k] = r->fields[k].start + world * r->fields[k].stride;
}

/* controls = clip(action, low, high). Returns whether the action is finite; an infinite one is none that a policy meant. */
static int set_controls(const Rollout *r, int64_t t, int64_t world) {
    const float *actions = r->actions + (t * r->worlds->num_worlds + world) * r->num_actions;
    double *controls = r->worlds->rows + world * r->worlds->width + r->controls;
    for (int64_t k = 0; k < r->num_actions; k++) {
        const double action = actions[k], low = r->low[k], high = r->high[k];
        if (!isfinite(action)) return 0;
        controls[k] = action < low ? low : action > high ? high : action;
    }
    return 1;
}

/* Reward, terminated, truncated and observation of a step. Returns whether the episode ended. */
static int compute_reward_done(const Rollout *r, int64_t t, int64_t world, const double *const *fields, double speed) {
    const int64_t index = t * r->worlds->num_worlds + world;
    const double *controls = r->worlds->rows + world * r->worlds->width + r->controls;
    float *obs = r->obs + world * r->obs_dim;
    r->terminated[index] = r->compute_reward_done(fields, controls, speed, r->rewards + index);
    r->truncated[index] = r->elapsed[world] >= r->limit;
    r->observe(fields, obs);
    if (!r->terminated[index] && !r->truncated[index]) return 0;
    memcpy(r->final_obs + index * r->obs_dim, obs, r->obs_dim * sizeof *obs);
    return 1;
}

/* End an unstable world's episode: terminated, reward 0, and as final observation the last one before the step. */
static void end_unstable(const Rollout *r, int64_t t, int64_t world) {
    const int64_t index = t * r->worlds->num_worlds + world;
    r->rewards[index] = 0.0f;
    r->terminated[index] = 1;
    r->truncated[index] = r->elapsed[world] >= r->limit;
    memcpy(r->final_obs + index * r->obs_dim, r->obs + world * r->obs_dim, r->obs_dim * sizeof *r->obs);
}

/* Claim the next item and wait until the group's previous step is done. Returns 0 where no item is left, or after
   ``cancelled``.

   The wait ends: items are claimed in order, so the previous step has an owner. ACQUIRE pairs with run_groups' RELEASE:
   this thread sees the state, observations and elapsed steps that the previous owner wrote. */
static int claim_group(Rollout *r, ThreadState *thread) {
    const int64_t n = r->worlds->num_worlds, groups = (n + r->group - 1) / r->group;
    const int64_t item = __atomic_fetch_add(&r->next, 1, __ATOMIC_RELAXED); /* only has to be atomic */
    thread->t = item / groups;
    thread->group = item % groups;
    if (thread->t >= r->num_steps) return 0;
    while (__atomic_load_n(&r->done[thread->group], __ATOMIC_ACQUIRE) < thread->t) {
        if (__atomic_load_n(&r->cancelled, __ATOMIC_RELAXED)) return 0;
        sched_yield();
    }
    thread->world = thread->group * r->group;
    thread->end = thread->world + r->group < n ? thread->world + r->group : n;
    return 1;
}

static int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* The policy's actions for the thread's group, and for a profile the times of that. */
static void act(const Rollout *r, ThreadState *thread) {
    int64_t *times = thread->acting ? thread->acting + 2 * thread->acted++ : NULL;
    if (times) times[0] = monotonic_ns();
    r->act(r->policy, r->acting, thread->t, thread->world, thread->end, r->obs, r->obs_dim * sizeof(float), thread->scratch);
    if (times) times[1] = monotonic_ns();
}

/* Claim groups and step them, at most ``max_groups``. Returns early where Python has to act; the next call continues
   there. */
static int64_t run_groups(Rollout *r, Simulation *s, ThreadState *thread, int64_t max_groups) {
    const double *fields[r->num_fields];
    for (;;) {
        /* 1. Claim a group; the policy acts for all of it. */
        if (thread->stage == NO_GROUP) {
            if (max_groups-- == 0) return LIMIT_REACHED;
            if (__atomic_load_n(&r->cancelled, __ATOMIC_RELAXED) || !claim_group(r, thread)) return NONE_LEFT;
            act(r, thread);
            thread->stage = STEP;
        }
        for (; thread->world < thread->end; thread->world++, thread->stage = STEP) {
            const int64_t world = thread->world;
            fields_of(r, world, fields);
            /* 2. Physics of one world. */
            if (thread->stage == STEP) {
                s->world = world;
                r->elapsed[world]++;
                if (!set_controls(r, thread->t, world)) return ACTION_NOT_FINITE;
                thread->start_position = r->forward_position(fields);
                thread->stage = REWARD;
                if (step_world(r->worlds, s, world, r->substeps)) return WARNED; /* Python decides whether it is unstable */
            }
            /* 3. Reward, end of episode and observation. */
            if (thread->stage == REWARD) {
                thread->stage = OBSERVE_START;
                if (thread->unstable) {
                    thread->unstable = 0;
                    end_unstable(r, thread->t, world);
                    return EPISODE_ENDED; /* Python starts the next episode */
                }
                const double speed = (r->forward_position(fields) - thread->start_position) / r->dt;
                if (compute_reward_done(r, thread->t, world, fields, speed)) return EPISODE_ENDED;
            } else /* 4. After EPISODE_ENDED: the new episode's first observation. */
                r->observe(fields, r->obs + world * r->obs_dim);
        }
        /* 5. The group's step is done: RELEASE publishes it to the thread that takes the group's next step. */
        thread->stage = NO_GROUP;
        __atomic_store_n(&r->done[thread->group], thread->t + 1, __ATOMIC_RELEASE);
    }
}

/* Step at most ``max_groups`` groups in this thread. WARNED, FAILED, EPISODE_ENDED and ACTION_NOT_FINITE concern
   ``s->world``. */
int64_t rayagi_run_rollout(Rollout *r, Simulation *s, ThreadState *thread, int64_t max_groups) {
    jmp_buf here;
    int64_t end;
    current_simulation = s;
    error_target = &here;
    if (setjmp(here))
        end = FAILED;
    else
        end = run_groups(r, s, thread, max_groups);
    error_target = NULL;
    return end;
}
