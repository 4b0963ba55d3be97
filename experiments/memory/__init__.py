"""A task that needs memory: recurrent policies beside one without (README.md)."""
