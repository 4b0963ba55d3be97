"""C backend (engine fused): a simulator compiled to vectorised C for the CPU."""
