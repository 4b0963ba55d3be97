"""Benchmark variants: a simulator on every backend that the paper compares. See catalogue.py and variant.py."""
