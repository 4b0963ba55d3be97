"""What serving costs: answers of the policy server, and rows of datasets."""
