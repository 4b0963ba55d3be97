"""The search against the full grid."""
