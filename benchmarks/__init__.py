"""How fast it is, and what it needs: a question in each file; `python -m benchmarks NAME` asks it."""
