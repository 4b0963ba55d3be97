"""How the code is built: what a reader of one training iteration passes, and the size of each package."""
