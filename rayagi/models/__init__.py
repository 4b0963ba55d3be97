"""Models: encoders of observations, networks, heads for actions, and the policy that holds them."""
