"""The paper's figures, Table 2, and its claims about a bandit."""
