"""The roles and the GMI that hosts them. Plain classes; Ray only in groups and rendezvous."""
