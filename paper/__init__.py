"""The paper's figures and Table 2."""
