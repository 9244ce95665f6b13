"""The paper's figures and Table 2, and a study of ours: `python -m figures.run fig1`."""
