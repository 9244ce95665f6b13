"""What train_gsm8k.py and all tasks share. A file imports only files above it in this list.

records.py          Problem, Prompt, Sample, Example, Task; InputError
distributed.py      ranks, devices, what ranks exchange, progress
numerals.py         numbers in text, for grades
files.py            JSON lines, atomic writes, the folder of a run
methods.py          METHODS: the losses of TOPR's family, PPO and DPO
language_model.py   tokenizer and weights
dataset.py          COMPOSITIONS; samples -> token ids -> rows -> steps -> tensors; log mu
settings.py         every setting, its range and where its default is from; the command line
adafactor.py        the paper's optimizer
training.py         sharding, LoRA, optimizers; models and checkpoints on the disk
hf_sampler.py       a model in this process samples, in batches
sampling.py         prompts; Engine; sample_to_file grades and saves
vllm_worker.py      vLLM in a separate process
vllm_client.py      sampling with it
evaluation.py       pass@k, maj@k, mean reward, shares of outcomes, with intervals
results.py          metrics.jsonl, results.json, curve.png
"""
