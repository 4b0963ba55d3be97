"""Asynchronous against synchronous training."""
