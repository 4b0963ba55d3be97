"""The C form: what a simulator becomes on a CPU."""
