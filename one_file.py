"""TOPR on one screen, with torch and transformers alone: sample, reward and learn, three rounds over."""

import argparse
import os
import random
import re

os.environ.setdefault(
    "GOMP_SPINCOUNT", "1000"
)  # read by torch: threads that spin on crawl beside a busy core
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

SUMS = random.Random(0).sample([(a, b) for a in range(3, 61) for b in range(3, 61)], 48)
QUESTIONS = [
    f"Q: Ada has {a} apples and finds {b} more. How many apples does Ada have now?\nA:"
    for a, b in SUMS
]
N, TRAINED = (
    8,
    256,
)  # samples of a question; how many of the 384 are trained on, those of the first 32 questions


def sample(
    model: torch.nn.Module, tokenizer: AutoTokenizer, questions: list[str]
) -> tuple[list[str], list[Tensor]]:
    """N completions of each question: texts; and (B, T): tokens, 1 where they are no padding, 1 on the completion."""
    asked = tokenizer(questions, return_tensors="pt", padding=True, padding_side="left")
    ids = model.generate(
        **asked, do_sample=True, top_k=0, max_new_tokens=32, num_return_sequences=N
    )
    asked, completions = (
        asked.attention_mask.repeat_interleave(N, 0),
        ids[:, asked.input_ids.shape[1] :],
    )
    ends = (completions == tokenizer.eos_token_id).long()
    mask = (
        ends.cumsum(1) - ends == 0
    ).long()  # up to the first end of sequence, which belongs to the completion
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return texts, [ids, torch.cat([asked, mask], 1), torch.cat([0 * asked, mask], 1)]


def log_pi(model: torch.nn.Module, ids: Tensor, mask: Tensor, is_completion: Tensor) -> Tensor:
    """log pi(y|x): (B,), the sum over the completion's tokens."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # prompts are padded on the left
    logp = model(ids, attention_mask=mask, position_ids=positions).logits[:, :-1].log_softmax(-1)
    return torch.where(
        is_completion[:, 1:] > 0, logp.gather(-1, ids[:, 1:, None])[..., 0], 0.0
    ).sum(1)


def topr_loss(logp: Tensor, logmu: Tensor, reward: Tensor, length: Tensor) -> Tensor:
    """A right completion has weight 1; a wrong one min(pi/mu, 1), which fades as the model lets go of it."""
    weight = torch.where(reward < 0, (logp - logmu).detach().clamp(max=0).exp(), 1.0)
    return -(weight * reward * logp / length).mean()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {
        "model": "tiny/base",
        "lr": 2e-4,
        "seed": 0,
        "out": "runs/one_file",
    }.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.manual_seed(given.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, weight_decay=0.0)
    for number in range(4):
        texts, rows = sample(model, tokenizer, QUESTIONS)
        right = torch.tensor(
            [re.findall("[0-9]+", x)[-1:] == [str(sum(SUMS[i // N]))] for i, x in enumerate(texts)]
        )
        shares = right[:TRAINED].float().mean(), right[TRAINED:].float().mean()
        print(
            "right: {:.0%}; of answers to questions that are not trained on: {:.0%}".format(*shares)
        )
        if number == 3:
            break
        with torch.no_grad():
            logmu = torch.cat(
                [log_pi(model, *(x[i] for x in rows)) for i in torch.arange(TRAINED).split(64)]
            )
        reward, watched, weights = 2.0 * right - 1, right.long().argmin(keepdim=True), []
        for batch in torch.randperm(TRAINED).split(64):
            logp, length = log_pi(model, *(x[batch] for x in rows)), rows[2][batch].sum(1)
            topr_loss(logp, logmu[batch], reward[batch], length).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            log_ratio = log_pi(model, *(x[watched] for x in rows)).detach() - logmu[watched]
            weights.append(f"{log_ratio.clamp(max=0).exp().item():.2f}")
        print(f"round {number + 1}: a wrong answer,{texts[watched]}")
        print("    Its weight is 1 while the model is still mu; after each step:", *weights)
    model.save_pretrained(given.out)
