"""The six tasks: do they learn, and how fast do they step?"""
