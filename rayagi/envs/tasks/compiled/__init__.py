"""A task's rules as a C program: on a CPU, one pass over the worlds in place of a hundred small tensor operations."""
