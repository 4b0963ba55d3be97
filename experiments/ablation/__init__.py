"""What each mechanism that exists for speed alone gains in training on CPUs; see README.md."""
