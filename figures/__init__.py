"""The paper's figures and Table 2, and two studies of ours: `python -m figures.run fig1`."""
