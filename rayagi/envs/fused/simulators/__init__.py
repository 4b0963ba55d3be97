"""The simulators that come with rayagi."""
