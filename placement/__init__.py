"""Placement of GMIs: inventory, GPU partitioning, plans, Ray placement groups. Knows no reinforcement learning."""
