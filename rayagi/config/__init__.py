"""From what a user writes to a frozen, checked RunSpec."""
