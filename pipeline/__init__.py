"""What every task shares: problems -> prompts -> samples -> grades -> dataset -> training -> evaluation.

What a small run goes through:

    records.py       Problem, Sample, Example and Task; their files; problems and worked examples from files or the hub
    settings.py      every setting, its range and origin; the command line that is read into it
    stages.py        the stages of a run: evaluate, sample, compose, train; each leaves one file
    sampling.py      prompts in, completions out, and then grades; ENGINES
    dataset.py       what a run is given; from samples to the batches of an epoch: token ids, rows, log mu, steps
    models/language_model.py      loading, sharding, log-probabilities
    runtime/processes.py          ranks, signals, how a command ends
    runtime/run_folder.py         what is done, what an interrupted run goes on from, what is published

What it may be told to use: a new method, composition, baseline, metric or engine is an entry of a table.

    compose.py       COMPOSITIONS, which samples an iteration trains on; BASELINES, what is subtracted from rewards
    methods.py       METHODS; the losses of PPO and DPO
    evaluation.py    METRICS: pass@k, maj@k, mean reward and the share of each outcome, with intervals
    own_samples.py   samples from elsewhere
    models/          chunked_head.py: log-probabilities without full logits; adafactor.py; chat.py: templates; lora.py
    vllm/            sampling with vLLM: client.py here, worker.py in a process of its own
    runtime/preflight.py   what a run needs of its machine

What it says:

    metrics.py       what a step of the optimiser saw
    results.py       results.json and curve.png
    report.py        an estimate with its interval, and a table
    plots.py         pictures
    track.py         a run in TensorBoard, wandb, trackio or MLflow
    dry_run.py       what a run would draw, train and need

train_gsm8k.py puts the stages in order; `topr.train` is the loop. No file here knows a task, or acts when imported.
"""
