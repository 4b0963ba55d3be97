"""Actions for robots and games outside: one policy, several clients, few inferences (docs/serving.md)."""
