"""Make what is in tiny/ from a seed: the problems, the tokenizer, the base model and the checker.

    python tiny/make.py                         # about 35 minutes on two cores, writes into tiny/
    python tiny/make.py --base tiny/base        # the same, but for the base model, which is taken as it is
    python tiny/make.py --out DIR --steps 50 --checker-steps 50   # the same files, with models that know little
    python tiny/make.py --out DIR --base tiny/base --checker-steps 0 --habit 1300
                                                # another base: tiny/base with misconceptions, 13 minutes on one core

A model is taught fresh problems by a teacher who first makes no mistake and then errs on purpose: it learns to reckon,
and then to be careless. README.md says why, and how tiny/worded was made; tiny/math was written by hand.
"""

import json
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault(
    "GOMP_SPINCOUNT", "1000"
)  # read by torch: threads that spin on crawl beside a busy core
import torch
import tyro
from problems import (
    FLAWLESS,
    MISTAKEN,
    TEACHER,
    Noise,
    WordProblem,
    draw_problem,
    solve,
    solve_badly,
    verify,
)
from tokenizers import Regex, Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS, PAD = "<eos>", "<pad>"


@dataclass(frozen=True)
class Settings:
    """What tiny/ is made of; every value is ours."""

    out: Path = Path(__file__).parent  # folder to write into
    base: Path | None = None  # a base model to take instead of teaching one
    seed: int = 0  # seed of the problems, the weights and the order of teaching
    steps: int = 2800  # optimiser steps of teaching the base model
    batch: int = 64  # texts per step
    lr: float = (
        2e-3  # peak learning rate of AdamW, reached after 5% of the steps, then a cosine to zero
    )
    flawless: float = (
        0.6  # share of the steps, the first ones, in which the teacher makes no mistake
    )
    verifications: float = (
        0.35  # share of the batches that are verifications of a solution rather than solutions
    )
    habit: int = 0
    """optimiser steps in which the base model is taught on: solutions alone, by `teacher`; more make it surer"""
    habit_lr: float = 1e-3  # peak learning rate of these steps
    teacher: Noise = MISTAKEN  # the mistakes that it then gets used to
    checker_steps: int = (
        1000  # optimiser steps of teaching the checker, all of them verifications; 0: no checker
    )


def new_problem(rng: random.Random, taken: set[str]) -> WordProblem:
    """A problem whose question is not in `taken`."""
    while (problem := draw_problem(rng)).question in taken:
        pass
    return problem


def lesson(
    rng: random.Random, taken: set[str], verification: bool, noise: Noise
) -> tuple[str, str]:
    """A prompt and the completion that a teacher with `noise` gives to it, about a problem that is not in `taken`."""
    problem = new_problem(rng, taken)
    prompt = f"Q: {problem.question}\nA:"
    if not verification:
        return prompt, solve_badly(problem, noise, rng)[0]
    solution, is_correct = solve_badly(
        problem, TEACHER, rng
    )  # what is to be checked is careless in any case
    return f"{prompt}{solution}\nCheck:", verify(solution, is_correct, noise, rng)


def make_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that can encode any text; each digit, with the space before it if any, is one token."""
    tokenizer, byte_level = Tokenizer(models.BPE()), ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = Sequence([Split(Regex(" ?[0-9]"), behavior="isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    symbols = {"special_tokens": [PAD, EOS], "initial_alphabet": ByteLevel.alphabet()}
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=768, show_progress=False, **symbols)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, model_max_length=4096
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """An untrained Llama of 0.95 million parameters; its sizes are ours."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
    }
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 4096}
    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, **ends, tie_word_embeddings=True))


def encode(
    tokenizer: PreTrainedTokenizerFast, lessons: list[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, T) of prompt, completion and end of sequence; and labels (B, T), -100 where nothing is taught."""
    prompts = tokenizer([prompt for prompt, _ in lessons])["input_ids"]
    completions = tokenizer([completion + EOS for _, completion in lessons])["input_ids"]
    ids = [torch.tensor(p + c) for p, c in zip(prompts, completions, strict=True)]
    labels = [torch.tensor([-100] * len(p) + c) for p, c in zip(prompts, completions, strict=True)]
    return pad_sequence(ids, True, tokenizer.pad_token_id), pad_sequence(labels, True, -100)


def teach(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, taken: set[str], settings: Settings
) -> None:
    """Supervised training of `model`, in place, on fresh lessons: next-token cross-entropy on the completions."""
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    warmup = max(settings.steps // 20, 1)

    def schedule(step: int) -> float:
        return min((step + 1) / warmup, (1 + math.cos(math.pi * step / settings.steps)) / 2)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    progress = tqdm(range(settings.steps), desc="teaching", unit="step")
    for step in progress:
        noise = FLAWLESS if step < settings.flawless * settings.steps else settings.teacher
        verification = rng.random() < settings.verifications
        ids, labels = encode(
            tokenizer, [lesson(rng, taken, verification, noise) for _ in range(settings.batch)]
        )
        logits = model(input_ids=ids).logits  # pads come last, so causal attention needs no mask
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}")


def main(settings: Settings) -> None:
    """Write train.jsonl, test.jsonl, base/ and checker/ into `settings.out`; base/ unless it is taken as it is."""
    settings.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(settings.seed)
    taken: set[str] = set()
    for name, count in (("test", 500), ("train", 1000)):
        lines = []
        for _ in range(count):
            problem = new_problem(rng, taken)
            taken.add(problem.question)
            solution, answer = solve(problem)
            row = {
                "question": problem.question,
                "answer": solution.replace(". ", ".\n") + f"\n#### {answer}",
            }
            lines.append(json.dumps(row) + "\n")
        (settings.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    texts = (
        "".join(lesson(rng, taken, verification, TEACHER))
        for verification in (False, True)
        for _ in range(5000)
    )
    tokenizer = make_tokenizer(texts)
    model = (
        LlamaForCausalLM.from_pretrained(settings.base)
        if settings.base
        else make_model(tokenizer, settings.seed)
    )
    base = replace(
        settings,
        steps=0 if settings.base else settings.steps,
        teacher=TEACHER,
        seed=settings.seed + 1,
    )
    habit = {
        "steps": settings.habit,
        "lr": settings.habit_lr,
        "verifications": 0.0,
        "flawless": 0.0,
    }
    checker = {
        "steps": settings.checker_steps,
        "lr": 1e-3,
        "verifications": 1.0,
        "flawless": 0.75,
        "teacher": TEACHER,
    }
    courses = [("base", base), ("base", replace(settings, **habit, seed=settings.seed + 21))]
    for name, course in (
        *courses,
        ("checker", replace(settings, **checker, seed=settings.seed + 11)),
    ):
        if course.steps:
            teach(model, tokenizer, taken, course)
            model.save_pretrained(settings.out / name)
            tokenizer.save_pretrained(settings.out / name)
            print(f"{model.num_parameters():,} parameters written to {settings.out / name}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
