"""Transports: threads of one process, shared memory of one host, one GPU's memory, NCCL, Gloo over TCP."""
