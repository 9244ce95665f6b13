"""What train_gsm8k.py and all tasks share. A file imports only files above it in this list.

    records.py            Problem, Prompt, Sample, Example, Task; InputError
    distributed.py        ranks, devices, what ranks exchange, progress
    files.py              JSON lines, atomic writes, the folder of a run
    command.py            how a command ends
    numerals.py           numbers in plain text and LaTeX
    problems.py           problems and worked examples from files, folders and the hub
    report.py             an estimate with its interval, and a table

    compositions.py       COMPOSITIONS: which samples to train on; BASELINES: what is subtracted
    methods.py            METHODS: the losses of TOPR's family, PPO and DPO
    metrics.py            the numbers of an optimizer step

    adafactor.py          the paper's optimizer, on sharded weights
    chat.py               chat templates
    lora.py               adapters
    language_model.py     loading, sharding, optimizers
    checkpoints.py        models and checkpoints on the disk

    external_samples.py   samples from elsewhere (--samples)
    settings.py           every setting, its range and where its default is from

    grading.py            grades and rewards of completions
    hf_sampler.py         a model in this process samples, in batches
    sampling.py           SamplingParameters, Engine, sample_to_file
    vllm_worker.py        vLLM in a separate process
    vllm_client.py        sampling with it
    batches.py            samples -> token ids -> rows -> optimizer steps -> tensors; log mu

    evaluation.py         METRICS: pass@k, maj@k, mean reward, shares of outcomes, with intervals
    plotting.py           pictures
    preflight.py          what a run needs of its machine
    results.py            what a run writes: dataset.json, metrics.jsonl, results.json
    dry_run.py            what a run would sample, train and need

A new method, composition, baseline or metric is an entry of a table. No file depends on a task.
"""
