"""Ways for data to travel: threads of one process, shared memory of one host, Gloo over TCP."""
