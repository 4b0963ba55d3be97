"""What a GPU's rollouts gain when the host is out of the way."""
