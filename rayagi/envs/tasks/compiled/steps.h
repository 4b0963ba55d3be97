/* Entry points of the library. Together they do TaskVecEnv.step (tasks/vec_env.py), world by world, around MuJoCo's physics:
   rayagi_control -> physics -> rayagi_after_physics -> for ended worlds rayagi_start -> forward pass -> rayagi_observe.
   The printed functions control, after_physics, observe and start are the task's, for one world i. */

/* Before physics: clip the actions to [-1, 1] and compute the controls. Returns -1; or the first world with a non-finite
   action, and then no world was changed. */
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

/* After physics: fill obs (n, OBS), rewards, terminated, truncated (n,) and the reward terms (n, TERMS).
   broken (n,): worlds with a simulation error, or null. They terminate with a reward of 0 and their previous observation, a
   row of last (n, OBS); so do worlds whose reward or observation is not finite, which unfit (1,) counts. Returns the number
   of ended episodes, whose worlds are the first entries of ended. */
int64_t rayagi_after_physics(const TaskWorlds *w, const uint8_t *broken, const float *last, float *obs, float *rewards,
                      uint8_t *terminated, uint8_t *truncated, int64_t *ended, float *terms, int64_t *unfit) {
    int64_t count = 0;
    for (int64_t i = 0; i < w->n; i++) {
        double draws[STEP_DRAWS + 1];
        draw(w, i, w->elapsed[i], STEP_DRAWS, draws); /* the same numbers as in rayagi_control */
        after_physics(w, i, draws, obs + i * OBS, rewards + i, terminated + i, terms + i * TERMS);
        int wrong = broken && broken[i], fit = isfinite(rewards[i]) != 0;
        for (int k = 0; k < OBS; k++) fit &= isfinite(obs[i * OBS + k]) != 0;
        if (!wrong && !fit) wrong = 1, ++*unfit;
        if (wrong) {
            memcpy(obs + i * OBS, last + i * OBS, OBS * sizeof(float));
            rewards[i] = 0.0f;
            for (int k = 0; k < TERMS; k++) terms[i * TERMS + k] = 0.0f;
            terminated[i] = 1;
        }
        truncated[i] = w->elapsed[i] >= w->limit;
        ended[count] = i; /* branch-free: kept only if the episode ended */
        count += terminated[i] | truncated[i];
    }
    return count;
}

/* Start new episodes in worlds ids (count,): write qpos, qvel and the memory, zero the actions. Before that, their rows of
   obs (n, OBS) are copied to final_obs (count, OBS). */
void rayagi_start(const TaskWorlds *w, const int64_t *ids, int64_t count, const float *obs, float *final_obs) {
    for (int64_t m = 0; m < count; m++) {
        int64_t i = ids[m];
        memcpy(final_obs + m * OBS, obs + i * OBS, OBS * sizeof(float));
        double draws[START_DRAWS + 1];
        w->elapsed[i] = 0;
        w->episode[i]++;
        draw(w, i, -1, START_DRAWS, draws); /* step -1: random_uniforms.START */
        start(w, i, draws);
        for (int k = 0; k < ACTIONS; k++) w->actions.at[i * ACTIONS + k] = 0.0;
    }
}

/* Write the observations of worlds ids (count,) to their rows of obs (n, OBS). */
void rayagi_observe(const TaskWorlds *w, const int64_t *ids, int64_t count, float *obs) {
    for (int64_t m = 0; m < count; m++) {
        double draws[STEP_DRAWS + 1];
        draw(w, ids[m], w->elapsed[ids[m]], STEP_DRAWS, draws);
        observe(w, ids[m], draws, obs + ids[m] * OBS);
    }
}
