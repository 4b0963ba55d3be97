"""Coordinator: deploys a run's GMIs, requests iterations from them, and merges the results.

Imports nothing here, so that planning for this machine does not load Ray.
"""
