"""Every table and figure of the five papers, drawn again for this machine."""
