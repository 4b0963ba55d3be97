"""The same simulator in every form that the paper compares, for measurements: see catalogue.py and variant.py."""
