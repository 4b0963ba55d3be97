/* What a step does to all worlds: vec_env.py's TaskVecEnv.step, world by world. */

/* Clip actions, and tell the actuators. Returns the first world whose action is not finite, of which nothing is done
   then; or -1. */
int64_t rayagi_control(const TaskWorlds *w) {
    for (int64_t i = 0; i < w->n; i++)
        for (int k = 0; k < ACTIONS; k++)
            if (!isfinite(w->actions.at[i * ACTIONS + k])) return i;
    for (int64_t i = 0; i < w->n; i++) {
        double *actions = w->actions.at + i * ACTIONS, draws[STEP_DRAWS + 1];
        for (int k = 0; k < ACTIONS; k++) actions[k] = most(least(actions[k], 1.0), -1.0);
        w->elapsed[i]++;
        draw(w, i, w->elapsed[i], STEP_DRAWS, draws);
        control(w, i, draws);
    }
    return -1;
}

/* After physics. broken: worlds with a fault (n,), or null: their step pays nothing, and they are seen as they were, in
   last (n, OBS). terms (n, TERMS): what the rewards are made of. Returns how many episodes ended, whose worlds' numbers are in ended. */
int64_t rayagi_after_physics(const TaskWorlds *w, const uint8_t *broken, const float *last, float *obs, float *rewards,
                      uint8_t *terminated, uint8_t *truncated, int64_t *ended, float *terms) {
    int64_t count = 0;
    for (int64_t i = 0; i < w->n; i++) {
        double draws[STEP_DRAWS + 1];
        draw(w, i, w->elapsed[i], STEP_DRAWS, draws);
        after_physics(w, i, draws, obs + i * OBS, rewards + i, terminated + i, terms + i * TERMS);
        if (broken && broken[i]) {
            memcpy(obs + i * OBS, last + i * OBS, OBS * sizeof(float));
            rewards[i] = 0.0f;
            for (int k = 0; k < TERMS; k++) terms[i * TERMS + k] = 0.0f;
            terminated[i] = 1;
        }
        truncated[i] = w->elapsed[i] >= w->limit;
        ended[count] = i;
        count += terminated[i] | truncated[i];
    }
    return count;
}

/* New episodes of some worlds: the state to start from, and the memory. What they showed last, rows of obs (n, OBS),
   goes to final_obs (count, OBS). */
void rayagi_start(const TaskWorlds *w, const int64_t *ids, int64_t count, const float *obs, float *final_obs) {
    for (int64_t m = 0; m < count; m++) {
        int64_t i = ids[m];
        memcpy(final_obs + m * OBS, obs + i * OBS, OBS * sizeof(float));
        double draws[START_DRAWS + 1];
        w->elapsed[i] = 0;
        w->episode[i]++;
        draw(w, i, -1, START_DRAWS, draws);
        start(w, i, draws);
        for (int k = 0; k < ACTIONS; k++) w->actions.at[i * ACTIONS + k] = 0.0;
    }
}

/* What some worlds show now, into their rows of obs (n, OBS). */
void rayagi_observe(const TaskWorlds *w, const int64_t *ids, int64_t count, float *obs) {
    for (int64_t m = 0; m < count; m++) {
        double draws[STEP_DRAWS + 1];
        draw(w, ids[m], w->elapsed[ids[m]], STEP_DRAWS, draws);
        observe(w, ids[m], draws, obs + ids[m] * OBS);
    }
}
