"""Learning algorithms: estimates and losses as pure functions, learners, updaters, and the programs that GMIs run."""
