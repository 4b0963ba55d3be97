"""Experience between GMIs: channels of Arrow batches in shared memory, and the papers' four components on them."""
