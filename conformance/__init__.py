"""Is that TOPR? Checks any implementation of the loss against the paper."""
