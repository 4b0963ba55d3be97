"""How GMIs exchange gradients and statistics. No Ray and no RL in it."""
