"""The six tasks of GMI-DRL Table 4 on rayagi's own engines: written once over tensors, with the papers' dimensions."""
