"""What train_gsm8k.py and all tasks share. A file imports only files above it in this list.

A constant or default is from the paper only if its comment names the section.

records.py          Problem, Prompt, Sample, Example, Task; InputError
distributed.py      ranks, devices, what ranks exchange, progress
numerals.py         numbers in text, for grades
files.py            JSON lines, atomic writes, the folder of a run
methods.py          METHODS: the losses of TOPR's family, PPO and DPO
language_model.py   tokenizer and weights
settings.py         every setting, its range and where its default is from; the command line
dataset.py          samples -> examples with token ids -> steps -> tensors; log mu
adafactor.py        the paper's optimizer
training.py         sharding, optimizers; models and checkpoints on the disk
hf_sampler.py       sampling with a model in this process, in batches
sampling.py         prompts; sample_to_file samples, grades and saves
vllm_client.py      sampling with vLLM, in a separate process
vllm_worker.py      that process
evaluation.py       pass@k, maj@k, mean reward, shares of outcomes, with intervals
results.py          metrics.jsonl, results.json, curve.png
"""
