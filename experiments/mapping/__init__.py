"""Which roles should share a GMI? Every template, in training and serving, measured beside the model's prediction."""
