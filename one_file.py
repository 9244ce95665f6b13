"""TOPR on one screen: sample, reward and learn, three times over. `python one_file.py`, or `--model NAME --lr 1e-6`.

At scale: train_gsm8k.py, with pipeline/sampling.py (`sample`), dataset.py (log mu, steps) and stages.py (the loop).
"""

import argparse
import os
import random
import re

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read by torch: threads that spin on crawl beside a busy core

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from topr import Batch, Step, sequence_logprobs, train

QUESTION = "Q: Ada has {} apples and finds {} more. How many apples does Ada have now?\nA:"
SUMS = random.Random(0).sample([(a, b) for a in range(3, 61) for b in range(3, 61)], 128)
N = 8  # samples of a problem


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sums: list) -> tuple[list[str], Batch]:
    """N completions of each question: as texts, and as a batch without log mu and rewards."""
    questions = [QUESTION.format(*pair) for pair in sums]
    asked = tokenizer(questions, return_tensors="pt", padding=True, padding_side="left")
    plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 32}
    ids = model.generate(**asked, **plain, num_return_sequences=N)  # (B, T)
    asked, completions = asked.attention_mask.repeat_interleave(N, 0), ids[:, asked.input_ids.shape[1] :]
    ends = (completions == tokenizer.eos_token_id).long()
    mask = (ends.cumsum(1) - ends == 0).long()  # up to the first end of sequence, which belongs to the completion
    masks = torch.cat([asked, mask], 1), torch.cat([0 * asked, mask], 1)
    return tokenizer.batch_decode(completions, skip_special_tokens=True), Batch(ids, *masks, None, None, mask.sum(1))


def is_right(texts: list[str], sums: list) -> torch.Tensor:
    """Whether the last number of each text is the sum: (B,)."""
    return torch.tensor([re.findall("[0-9]+", t)[-1:] == [str(sum(sums[i // N]))] for i, t in enumerate(texts)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"model": "tiny/base", "lr": 1e-4, "seed": 0, "out": "runs/one_file"}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args()
    os.makedirs(given.out, exist_ok=True)
    torch.manual_seed(given.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, weight_decay=0.0)
    for _ in range(3):
        texts, batch = sample(model, tokenizer, SUMS[:64])
        with torch.no_grad():
            batch = batch._replace(logmu=sequence_logprobs(model, batch), reward=2.0 * is_right(texts, SUMS) - 1)
        parts = [Batch(*(column[rows] for column in batch)) for rows in torch.randperm(len(texts)).split(64)]
        for stats in train(model, optimizer, [Step([part], len(part.reward)) for part in parts]):
            right, wrong = stats.weight[stats.reward > 0], stats.weight[stats.reward < 0]
            print(f"{len(right)} right, weight {right.mean():.2f}; {len(wrong)} wrong, weight {wrong.mean():.2f}")
        texts, _ = sample(model, tokenizer, SUMS[64:])
        print(f"right on other problems: {is_right(texts, SUMS[64:]).float().mean():.0%}")
    model.save_pretrained(given.out)
