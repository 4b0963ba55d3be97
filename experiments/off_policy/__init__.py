"""Off-policy algorithms beside other libraries'."""
