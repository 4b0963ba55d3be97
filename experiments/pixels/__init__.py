"""Learning from images: an environment that MuJoCo renders, and its runs."""

import rayagi.envs  # noqa: F401 - sets MUJOCO_GL, which MuJoCo reads when it is imported
