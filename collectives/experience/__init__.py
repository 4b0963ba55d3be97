"""Experience between GMIs: shared-memory channels of Arrow batches, and dispenser, packer, migrator and batcher."""
