"""Gymnasium's MuJoCo v5 tasks, stepped in batches on CPU cores with Gymnasium's own semantics."""
