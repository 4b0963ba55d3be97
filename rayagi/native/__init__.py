"""C kernels, compiled on the machine they run on: learning, acting and MuJoCo worlds."""
