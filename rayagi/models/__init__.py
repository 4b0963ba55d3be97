"""Models: observation encoders, networks, action heads, and the policy that combines them."""
