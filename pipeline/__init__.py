"""What every task shares, one file per stage:

problems -> prompts -> samples -> grades -> dataset -> training -> evaluation

    records.py     Problem, Sample and Task; reading and writing them as JSON lines
    models.py      language models and tokenizers from a folder or the hub
    sampling.py    prompts in, completions out; then graded into samples
    dataset.py     samples in, the steps of an epoch out: encoding, log mu, baseline, pairs
    rows.py        completions of one prompt in one row: their layout and log-probabilities
    evaluation.py  pass@k, maj@k and the share of each outcome, with intervals
    run.py         the folder a run writes into
    plots.py       pictures

Training itself is `topr.train`. No file here knows GSM8K, and none does anything when imported.
"""
