"""What reducing gradients among GMIs costs."""
