"""What every task shares: problems -> prompts -> samples -> grades -> dataset -> training -> evaluation.

From the ground up: a file imports from files above its own line in this list, and from no other.

    records.py                what flows through the pipeline, and its files; problems and worked examples
    report.py                 an estimate with its interval, and a table
    metrics.py                what a step of the optimiser saw, in numbers
    methods.py                METHODS; the losses of PPO and DPO
    compositions.py            COMPOSITIONS, which samples are trained on; BASELINES, what is subtracted from rewards

    runtime/processes.py      ranks, progress, times, signals, how a command ends
    runtime/run_folder.py     what is done, what an interrupted run goes on from, what is published
    own_samples.py            samples from elsewhere
    settings.py               every setting, its range and origin; the command line that is read into it
    runtime/preflight.py      what a run needs of its machine

    models/adafactor.py       the paper's optimiser, on sharded weights
    models/chat.py            chat templates
    models/lora.py            adapters
    models/language_model.py  loading, sharding, batches in tensors
    models/checkpoints.py     models and checkpoints on the disk

    sampling.py               prompts in, completions out, and then grades
    dataset.py                what a run reads; from samples to the batches of an epoch: token ids, rows, log mu, steps
    evaluation.py             METRICS: pass@k, maj@k, mean reward and the share of each outcome, with intervals
    vllm/worker.py            vLLM in a process of its own
    vllm/client.py            sampling with it

    plots.py                  pictures
    dry_run.py                what a run would draw, train and need
    times.py                  times.json as a table
    held.py                   an engine or a model in training, of which a GPU holds one; ENGINES; times.json
    epoch.py                  around the optimiser's steps: a warning, their log, what is saved, faults in plain words
    results.py                results.json and curve.png
    stages.py                 the stages of a run: evaluate, sample, compose, score, train; each leaves one file

train_gsm8k.py puts the stages in order; `topr.train` is the loop. A new method, composition, baseline, metric or engine
is an entry of a table. No file here knows a task, or acts when imported.
"""
