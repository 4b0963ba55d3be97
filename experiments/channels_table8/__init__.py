"""Uni-channel against multi-channel: the preprint's Table 8 on this machine."""
