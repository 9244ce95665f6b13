"""What every task shares, one file per stage:

problems -> prompts -> samples -> grades -> dataset -> training -> evaluation

    settings.py      every setting, the presets, what is refused
    run.py           the stages in their order, iteration by iteration
    command.py       what the commands share: settings, table, errors
    problems.py      problems and worked examples from files, the hub, or a package
    records.py       Problem, Sample and Task; reading and writing them as JSON lines
    judge.py         whether two mathematical answers are the same, in a process of its own: judge_worker.py
    models.py        language models and tokenizers from a folder or the hub
    sampling.py      prompts in, completions out; then graded into samples
    vllm_engine.py   the same by vLLM, in a process of its own: vllm_worker.py
    composition.py   which samples an iteration trains on
    dataset.py       samples in, the steps of an epoch out: encoding, log mu, baseline, pairs
    rows.py          completions of one prompt in one row: their layout and log-probabilities
    training.py      a model over several processes, its optimiser, checkpoints
    evaluation.py    pass@k, maj@k and the share of each outcome, with intervals
    plan.py          what a run would need
    sweep.py         many runs side by side, each made once
    stopping.py      Ctrl-C and SIGTERM
    parallel.py      what several processes do together
    folder.py        the folder a run writes into
    checksums.py     whether what it wrote is still what it was
    plots.py         pictures

The training loop is `topr.train`. No file here knows GSM8K or MATH, and none does anything when imported.
"""
