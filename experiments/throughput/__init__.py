"""Environment steps per second against peers and against the limit; see README.md."""
