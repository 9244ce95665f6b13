"""Language models: loading, log-probabilities, sharding."""
