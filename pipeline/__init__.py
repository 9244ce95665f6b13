"""What every task shares: problems -> prompts -> samples -> grades -> dataset -> training -> evaluation.

    records.py       Problem, Sample, Example and Task; their files; problems and worked examples from files or the hub
    settings.py      every setting, its range and origin; the command line that is read into it
    inputs.py        what a run is given, read and checked before it begins; own_samples.py: samples from elsewhere
    stages.py        the stages of a run: evaluate, sample, compose, train; each leaves one file
    sampling.py      prompts in, completions out
    grading.py       completions in, samples out: a task's own functions are called here alone
    compose.py       which samples an iteration trains on, and their baseline
    dataset.py       from samples to the batches of an epoch: token ids, rows, log mu, steps
    methods.py       the losses of PPO and DPO
    metrics.py       what a step of the optimiser saw
    evaluation.py    pass@k, maj@k, mean reward and the share of each outcome, with intervals; held_out.py: log pi of
                     samples that are not trained on
    plots.py         pictures; track.py: a run in TensorBoard, wandb, trackio or MLflow
    dry_run.py       what a run would draw, train and need
    rehearsal.py     what a training step needs, on tensors without values; the choices that fit a GPU
    models/          language_model.py: loading, sharding, log-probabilities; chunked_head.py: these without full
                     logits; adafactor.py: the optimiser of sharded weights; chat.py: chat templates; lora.py: adapters
    runtime/         processes.py: ranks, signals, commands; run_folder.py: stages' files; checkpoints.py
    vllm/            sampling with vLLM: client.py here, worker.py in a process of its own

train_gsm8k.py puts the stages in order; the training loop is `topr.train`. No file here knows a task, and none does
anything when imported.
"""
