"""When do several GMIs on the same cores gain over one? See README.md."""
