"""Monitoring of a run: metric catalogue, terminal progress, Ray metrics, plots and reports."""
