"""Heat in a plate over GMIs: a workload that is no reinforcement learning, by the papers' programming interface."""
