"""TOPR on one screen, with torch and transformers alone: sample, reward and learn, three times."""

import argparse
import os
import random
import re

# Read when torch is imported: threads that spin while they wait are slow next to a busy core.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

NUMBERS = random.Random(0).sample([(a, b) for a in range(4, 61) for b in range(3, a)], 48)
QUESTION = "Q: Kim owns {} books and sells {} of them. How many books are left?\nA:"
QUESTIONS = [QUESTION.format(a, b) for a, b in NUMBERS]
N = 8  # completions per question
TRAINED = 32 * N  # train on the completions of the first 32 questions


def sample(
    model: torch.nn.Module, tokenizer: AutoTokenizer, questions: list[str]
) -> tuple[list[str], list[Tensor]]:
    """N completions of each question: texts, and [ids (B, L), attention mask (B, L), mask (B, T)].

    The completions are the last T columns; mask is 1 on their tokens, end of sequence included.
    """
    prompts = tokenizer(questions, return_tensors="pt", padding=True, padding_side="left")
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 48, "num_return_sequences": N}
    ids = model.generate(**prompts, **options)
    completions = ids[:, prompts.input_ids.shape[1] :]
    ends = (completions == tokenizer.eos_token_id).long()
    mask = (ends.cumsum(1) - ends == 0).long()  # 0 after the first end of sequence
    attention = torch.cat([prompts.attention_mask.repeat_interleave(N, 0), mask], 1)
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return texts, [ids, attention, mask]


def is_right(text: str, question: int) -> bool:
    """Whether the last number of a completion is the difference that its question asks for."""
    numbers = re.findall("[0-9]+", text)
    a, b = NUMBERS[question]
    return numbers[-1:] == [str(a - b)]


def token_logprobs(model: torch.nn.Module, ids: Tensor, attention: Tensor, mask: Tensor) -> Tensor:
    """log pi of each token of the completions: (B, T), 0 on padding."""
    width = mask.shape[1]  # T
    positions = (attention.cumsum(1) - 1).clamp(min=0)  # prompts are padded on the left
    logits = model(ids, attention_mask=attention, position_ids=positions).logits  # (B, L, V)
    logp = logits[:, -width - 1 : -1].log_softmax(-1)  # (B, T, V): each predicts the next token
    token_logp = logp.gather(-1, ids[:, -width:, None])[..., 0]
    return torch.where(mask > 0, token_logp, 0.0)


def topr_loss(token_logp: Tensor, token_logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """A right completion has weight 1; a wrong one min(pi/mu, 1), near 0 once it is unlikely."""
    log_ratio = torch.where(mask > 0, token_logp.detach() - token_logmu, 0.0).sum(1)  # (B,)
    weight = torch.where(reward < 0, log_ratio.clamp(max=0).exp(), 1.0)  # (B,)
    token_loss = -(weight * reward)[:, None] * torch.where(mask > 0, token_logp, 0.0)  # (B, T)
    return (token_loss.sum(1) / mask.sum(1)).mean()  # over tokens, then over completions


def select(rows: list[Tensor], index: Tensor) -> list[Tensor]:
    """Some rows of each tensor."""
    return [tensor[index] for tensor in rows]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny/base")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/one_file")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    for number in range(4):
        texts, rows = sample(model, tokenizer, QUESTIONS)  # by mu, the model as it is now
        right = torch.tensor([is_right(text, index // N) for index, text in enumerate(texts)])
        print(f"right: {right[:TRAINED].float().mean():.0%} on training questions,", end=" ")
        print(f"on other questions {right[TRAINED:].float().mean():.0%}")
        if number == 3:
            break
        reward = 2.0 * right - 1
        with torch.no_grad():
            blocks = torch.arange(TRAINED).split(64)
            parts = [token_logprobs(model, *select(rows, block)) for block in blocks]
        token_logmu = torch.cat(parts)  # (TRAINED, T)
        watched = right.long().argmin(keepdim=True)  # the first wrong answer
        weights = []
        for batch in torch.randperm(TRAINED).split(64):
            ids, attention, mask = select(rows, batch)
            token_logp = token_logprobs(model, ids, attention, mask)
            topr_loss(token_logp, token_logmu[batch], reward[batch], mask).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            token_logp = token_logprobs(model, *select(rows, watched)).detach()
            log_ratio = (token_logp - token_logmu[watched]).sum()
            weights.append(f"{log_ratio.clamp(max=0).exp():.2f}")
        print(f"round {number + 1}: a wrong answer,{texts[watched]}")
        print("    Its weight is 1 while the model is still mu; after each step:", *weights)
    model.save_pretrained(args.out)
