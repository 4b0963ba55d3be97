"""Compiler of task functions to C: on a CPU, one pass over the worlds replaces a hundred small tensor operations.

``tensors`` records torch operations, ``trace`` makes functions of one world of them, ``program``
prints them in C, compiles and loads it.
"""
