"""Trained policies at work: datasets of their experience, and actions for robots outside (docs/explanation/serving.md)."""
