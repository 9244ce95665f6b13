"""Make what is in tiny/ from a seed: the problems, the tokenizer, the base model and the checker.

    python tiny/make.py                      # 35 minutes on two cores; writes into tiny/
    python tiny/make.py --base tiny/base     # the same from this base model, without training one
    python tiny/make.py --out DIR --steps 50 --checker-steps 50          # models that know little
    python tiny/make.py --out DIR --base tiny/base --checker-steps 0 --habit 1300
                                             # tiny/base with misconceptions: 13 minutes, one core

A model is trained on new problems and the solutions of a teacher, who first makes no mistake and
then makes them on purpose: the model first learns arithmetic, then learns to make mistakes.
README.md says why, and how tiny/worded was made; tiny/math was written by hand.
"""

import json
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

# Read by torch when it is imported: threads that spin while they wait slow a busy machine down.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

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

EOS = "<eos>"
PAD = "<pad>"
IGNORED = -100  # a label that cross_entropy leaves out
PROBLEMS = {"test": 500, "train": 1000}  # test problems are made first, of questions not used yet


@dataclass(frozen=True)
class Settings:
    """What tiny/ is made of; every value is ours."""

    out: Path = Path(__file__).parent
    """folder to write into"""
    base: Path | None = None
    """a base model to start from; default: a new one is trained"""
    seed: int = 0
    """seed of the problems, the weights and the order of training"""
    steps: int = 2800
    """optimizer steps of training the base model"""
    batch: int = 64
    """texts per step"""
    lr: float = 2e-3
    """peak learning rate of AdamW, reached after 5% of the steps, then a cosine to zero"""
    flawless: float = 0.6
    """share of the steps, the first ones, in which the teacher makes no mistake"""
    verifications: float = 0.35
    """share of the batches that are verifications of a solution instead of solutions"""
    habit: int = 0
    """optimizer steps of fine-tuning on solutions by `teacher`; more make arithmetic reliable"""
    habit_lr: float = 1e-3
    """peak learning rate of these steps"""
    teacher: Noise = MISTAKEN
    """the mistakes of these solutions"""
    checker_steps: int = 1000
    """optimizer steps of training the checker on verifications; 0: no checker"""


# ---- texts ---------------------------------------------------------------------------------------
def new_problem(rng: random.Random, used: set[str]) -> WordProblem:
    """A problem whose question is not in `used`."""
    problem = draw_problem(rng)
    while problem.question in used:
        problem = draw_problem(rng)
    return problem


def make_example(
    rng: random.Random, used: set[str], is_verification: bool, noise: Noise
) -> tuple[str, str]:
    """A prompt about a new problem, and the completion by a teacher with `noise`."""
    problem = new_problem(rng, used)
    prompt = f"Q: {problem.question}\nA:"
    if not is_verification:
        return prompt, solve_badly(problem, noise, rng)[0]
    # The solution to check has mistakes, whatever the noise of its verification.
    solution, is_correct = solve_badly(problem, TEACHER, rng)
    return f"{prompt}{solution}\nCheck:", verify(solution, is_correct, noise, rng)


def write_problems(out: Path, rng: random.Random) -> set[str]:
    """Write test.jsonl and train.jsonl in GSM8K's form; returns their questions."""
    used: set[str] = set()
    for split, count in PROBLEMS.items():
        lines = []
        for _ in range(count):
            problem = new_problem(rng, used)
            used.add(problem.question)
            solution, answer = solve(problem)
            steps = solution.replace(". ", ".\n")
            row = {"question": problem.question, "answer": f"{steps}\n#### {answer}"}
            lines.append(json.dumps(row) + "\n")
        (out / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return used


# ---- tokenizer and model -------------------------------------------------------------------------
def tokenizer_texts(rng: random.Random, used: set[str], count: int = 5000) -> Iterator[str]:
    """Solutions, then as many verifications, with their prompts."""
    for is_verification in (False, True):
        for _ in range(count):
            prompt, completion = make_example(rng, used, is_verification, TEACHER)
            yield prompt + completion


def make_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, which can encode any text.

    Each digit, with the space before it if there is one, is one token.
    """
    tokenizer = Tokenizer(models.BPE())
    digits = Split(Regex(" ?[0-9]"), behavior="isolated")
    tokenizer.pre_tokenizer = Sequence([digits, ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=768,
        show_progress=False,
        special_tokens=[PAD, EOS],
        initial_alphabet=ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, model_max_length=4096
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """An untrained Llama of 0.95 million parameters; its sizes are ours."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


# ---- training ------------------------------------------------------------------------------------
def encode(
    tokenizer: PreTrainedTokenizerFast, examples: list[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, T) of prompt, completion and end of sequence, and their labels (B, T).

    Labels are the completion's token ids, and IGNORED on prompt and padding.
    """
    prompts = tokenizer([prompt for prompt, _ in examples])["input_ids"]
    completions = tokenizer([completion + EOS for _, completion in examples])["input_ids"]
    ids = []
    labels = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids.append(torch.tensor(prompt + completion))
        labels.append(torch.tensor([IGNORED] * len(prompt) + completion))
    padded_ids = pad_sequence(ids, True, tokenizer.pad_token_id)  # (B, T)
    return padded_ids, pad_sequence(labels, True, IGNORED)


def train_supervised(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, used: set[str], settings: Settings
) -> None:
    """Train `model`, in place, on new examples: next-token cross-entropy on the completions."""
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    warmup = max(settings.steps // 20, 1)

    def schedule(step: int) -> float:
        return min((step + 1) / warmup, (1 + math.cos(math.pi * step / settings.steps)) / 2)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    progress = tqdm(range(settings.steps), desc="training", unit="step")
    for step in progress:
        is_flawless = step < settings.flawless * settings.steps
        noise = FLAWLESS if is_flawless else settings.teacher
        is_verification = rng.random() < settings.verifications
        examples = []
        for _ in range(settings.batch):
            examples.append(make_example(rng, used, is_verification, noise))
        ids, labels = encode(tokenizer, examples)
        # Padding comes last, so causal attention needs no mask.
        logits = model(input_ids=ids).logits  # (B, T, V)
        # Each position predicts the next token: (B (T - 1), V) against (B (T - 1),).
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}")


def stages(settings: Settings) -> list[tuple[str, Settings]]:
    """The stages of training: the folder that each one writes, and its settings."""
    base = replace(
        settings,
        steps=0 if settings.base else settings.steps,
        teacher=TEACHER,
        seed=settings.seed + 1,
    )
    habit = replace(
        settings,
        steps=settings.habit,
        lr=settings.habit_lr,
        verifications=0.0,
        flawless=0.0,
        seed=settings.seed + 21,
    )
    checker = replace(
        settings,
        steps=settings.checker_steps,
        lr=1e-3,
        verifications=1.0,
        flawless=0.75,
        teacher=TEACHER,
        seed=settings.seed + 11,
    )
    return [("base", base), ("base", habit), ("checker", checker)]


def main(settings: Settings) -> None:
    """Write train.jsonl, test.jsonl, and the models of the stages that have steps."""
    settings.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(settings.seed)
    used = write_problems(settings.out, rng)
    tokenizer = make_tokenizer(tokenizer_texts(rng, used))
    if settings.base:
        model = LlamaForCausalLM.from_pretrained(settings.base)
    else:
        model = make_model(tokenizer, settings.seed)
    for name, stage in stages(settings):
        if stage.steps > 0:
            train_supervised(model, tokenizer, used, stage)
            folder = settings.out / name
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            print(f"{model.num_parameters():,} parameters written to {folder}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
