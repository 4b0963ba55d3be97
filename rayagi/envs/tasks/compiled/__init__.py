"""Compiler of task functions to C: on a CPU, one pass over the worlds replaces a hundred small tensor operations.

``tensors`` records torch operations, ``trace`` makes functions of one world of them, ``source`` prints C, ``program``
compiles and loads it.
"""
