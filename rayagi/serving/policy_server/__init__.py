"""Policy server: actions for external robots and games, over HTTP or a local socket (docs/explanation/serving.md)."""
