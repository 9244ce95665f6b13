"""Experiments on TOPR: `passes` is our own, `paper` repeats the claims of the paper."""
