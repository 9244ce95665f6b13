"""What several tests share: files, small models, engines, small runs, and work on two ranks.

As a program this file is train_gsm8k.py with small chunks: torchrun starts it on each rank.
"""

import gc
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache
from hashlib import sha256
from itertools import chain
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM

import topr
import train_gsm8k as gsm8k
from toprlib import dataset, sampling, training
from toprlib.adafactor import Adafactor
from toprlib.records import Example, Problem, Prompt, Task
from toprlib.settings import Settings

ROOT = Path(gsm8k.__file__).parent


# ---- files ---------------------------------------------------------------------------------------
def write_rows(file: Path, rows: Iterable[dict]) -> str:
    """A JSON-lines file. Returns its path as text."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def read_rows(file: Path) -> list[dict]:
    """The rows of a JSON-lines file."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def count_lines(file: Path) -> int:
    """The complete lines of a file, 0 without one."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file below a folder by its relative path; logs of vLLM left out."""
    sums = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".log":
            sums[str(path.relative_to(folder))] = sha256(path.read_bytes()).hexdigest()
    return sums


# ---- small models, examples and batches ----------------------------------------------------------
VOCABULARY = 32


def tiny_llama(seed=0, dtype=torch.float64):
    """An untrained Llama with a vocabulary of 32, far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def random_examples(prompts, per_prompt, seed=0):
    """Examples of random tokens and lengths, with rewards of both signs and random log mu."""
    rng = random.Random(seed)
    examples = []
    for _ in range(prompts):
        prompt_ids = random_tokens(rng, most=9)
        for _ in range(per_prompt):
            completion_ids = random_tokens(rng, most=6)
            reward = rng.choice([-1.0, 1.0])
            token_logmu = [-rng.uniform(0.5, 6) for _ in completion_ids]
            sample = len(examples)
            example = Example(prompt_ids, completion_ids, reward, sample, sample, token_logmu)
            examples.append(example)
    return examples


def numbered(examples):
    return [replace(example, line=line) for line, example in enumerate(examples)]


def ordered_examples(prompts, per_prompt, uses_pairs=False):
    """Random examples in an order of training."""
    order = dataset.pair_examples if uses_pairs else dataset.shuffle_examples
    return numbered(order(random_examples(prompts, per_prompt), random.Random(0)))


def random_tokens(rng, most):
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, most))]


def plain_batch(examples, filler=0, extra=0):
    """The examples as a float64 batch, made without `collate`.

    filler: the token id of padding. extra: columns of padding more than needed.
    """
    rows = [torch.tensor(example.prompt_ids + example.completion_ids) for example in examples]
    width = max(len(row) for row in rows) + extra
    input_ids = torch.full((len(rows), width), filler)
    masks = torch.zeros(len(rows), width)
    values = torch.zeros(len(rows), width, dtype=torch.float64)
    for i, example in enumerate(examples):
        completion = slice(len(example.prompt_ids), len(rows[i]))
        input_ids[i, : len(rows[i])] = rows[i]
        masks[i, completion] = 1
        values[i, completion] = torch.tensor(example.token_logmu, dtype=torch.float64)
    first = int(masks.argmax(1).min())
    reward = torch.tensor([example.reward for example in examples], dtype=torch.float64)
    return topr.Batch(input_ids, masks[:, first:], values[:, first:], reward)


def unpadded_logprobs(model, example):
    """The log-softmax of each completion token at the position before it, without a batch."""
    ids = torch.tensor([example.prompt_ids + example.completion_ids])
    token_logp = model(ids).logits[0].log_softmax(-1)
    start = len(example.prompt_ids)
    values = []
    for offset, token in enumerate(example.completion_ids):
        values.append(token_logp[start + offset - 1, token])
    return torch.stack(values)


def whole(tensors):
    """All elements of ordinary or sharded tensors, in one vector."""
    parts = []
    for tensor in tensors:
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        parts.append(full.detach().flatten())
    return torch.cat(parts)


def flat_weights(model):
    return whole(model.parameters())


def flat_gradients(model):
    return whole([weight.grad for weight in model.parameters()])


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


# ---- engines -------------------------------------------------------------------------------------
MODEL = str(ROOT / "tiny" / "base")
PROMPT = "Q: Ada has 31 apples and finds 45 more. How many apples does Ada have now?\nA:"


def make_prompts(lm, texts):
    """A prompt of each text as it is."""
    pairs = zip(texts, lm.prompt_ids(texts), strict=True)
    return [Prompt(Problem(text), text, ids) for text, ids in pairs]


def generate(engine, prompts, n=8, seed=0):
    """The fields of n completions of each prompt."""
    completions = [[] for _ in prompts]
    for index, fields in chain.from_iterable(engine.generate(prompts, n, seed)):
        completions[index].append(fields)
    assert [len(of_prompt) for of_prompt in completions] == [n] * len(prompts)
    return completions


def exact_logprobs(lm, prompt, token_ids):
    """log pi of every token of the vocabulary at each token of a completion: (T, V), float64.

    The model computes prompt and completion at once, without a cache.
    """
    prompt_ids = lm.prompt_ids([prompt])[0]
    input_ids = torch.tensor([prompt_ids + token_ids])
    with torch.no_grad():
        logits = lm.model(input_ids).logits[0, len(prompt_ids) - 1 : -1]
    return logits.double().log_softmax(-1)


def token_logprobs(logprobs, token_ids):
    """log pi (T,) of the tokens of a completion, from that of all tokens."""
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0]


def check_stop_string(completions, tokenizer, stop):
    """Enough completions have the stop string, and all of them end with the token that has it."""
    stopped = [fields for fields in completions if stop in fields["completion"]]
    assert len(stopped) > len(completions) / 2
    for fields in stopped:
        assert fields["finish_reason"] == "stop"
        assert fields["completion"] == tokenizer.decode(fields["token_ids"])
        assert stop not in tokenizer.decode(fields["token_ids"][:-1])


def check_seeds(engine, prompt):
    """Completion j of prompt i has the seed plus i n plus j, and depends on nothing else."""
    of_two_prompts = generate(engine, [prompt, prompt], n=3, seed=10)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    by_seed = [generate(engine, [prompt], 1, seed)[0][0] for seed in range(10, 16)]
    token_ids = [fields["token_ids"] for fields in chain(*of_two_prompts)]
    assert token_ids == [fields["token_ids"] for fields in by_seed]
    assert len({tuple(ids) for ids in token_ids}) > 3
    assert torch.equal(state, torch.random.get_rng_state())


# ---- runs in this process ------------------------------------------------------------------------
CHUNK = 2  # prompts between two writes to the disk, in place of 256

# Four steps of 16 of 64 samples; all problems but one have samples of both signs.
SMALL = Settings(
    problems=8,
    n=8,
    max_new_tokens=48,
    test_problems=4,
    eval_samples=8,
    k=4,
    evaluate_after=(0.5,),
)
# Two iterations of 6 steps with checkpoints after 2 and 4: for tests that kill a run.
TWO_ITERATIONS = {
    "problems": 4,
    "batch_size": 4,
    "save_every": 2,
    "optimizer": "adafactor",
    "lr": 1e-3,
    "iterations": 2,
    "examples": 24,
    "test_problems": 2,
}


def run_small(
    folder: Path,
    make_task: Callable[[Settings], Task] = gsm8k.gsm8k_task,
    loss: Callable | None = None,
    **changes,
) -> dict:
    """A run of SMALL with changes, in `folder`; returns the content of results.json."""
    settings = replace(SMALL, out=folder, **changes)
    with mock.patch.object(sampling, "CHUNK", CHUNK):
        return gsm8k.experiment(settings, make_task(settings), loss)


# ---- commands in processes of their own ----------------------------------------------------------
class Command:
    """The command of a run of SMALL with changes, in a folder of its own."""

    def __init__(self, folder: Path, ranks: int = 1, **changes) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self.ranks = ranks
        self.arguments = []
        defaults = asdict(Settings())
        for name, value in asdict(replace(SMALL, **changes, out=folder)).items():
            if value is True:
                self.arguments.append(f"--{name.replace('_', '-')}")
            elif value != defaults[name]:
                values = value if isinstance(value, tuple) else [value]
                self.arguments += [f"--{name.replace('_', '-')}", *map(str, values)]

    @contextmanager
    def start(self) -> Iterator[BaseProcess]:
        """A process with the command, or with torchrun; killed after the block."""
        arguments = (self.arguments, self.log, self.ranks)
        process = start_fork_server().Process(target=_run_forked, args=arguments)
        process.start()
        try:
            yield process
        finally:
            kill_all(process)

    def finish(self) -> dict[str, str]:
        """Run the command to its end; returns the checksums of its files."""
        with self.start() as process:
            process.join()
            assert process.exitcode == 0, self.log.read_text()[-3000:]
        return checksums(self.folder)

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Run the command, and kill it when the condition holds."""
        with self.start() as process:
            wait_until(is_reached, process)


def kill_all(process: BaseProcess) -> None:
    """kill -9 a process and all that it has started."""
    with suppress(psutil.NoSuchProcess):  # it has ended by itself
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.kill()
    process.join()


def wait_until(condition: Callable[[], object], process: BaseProcess) -> None:
    """Wait for a condition; fails if the process ends before."""
    while not condition():
        assert process.is_alive(), "the command has ended before"
        time.sleep(0.002)


@cache
def start_fork_server() -> multiprocessing.context.BaseContext:
    """Starts processes that have imported this module, and what a run imports, already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers", "matplotlib.figure"])
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
    return context


def _run_forked(arguments: list[str], log: Path, ranks: int) -> None:
    """What a process of `Command.start` does."""
    gc.freeze()  # a collection need not look through the modules
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if ranks == 1:
        _run_command(arguments)
    else:
        # "--", because torchrun would take --n for an abbreviation of an option of its own.
        os.environ["PYTHONPATH"] = str(ROOT)
        torchrun.main(["--nproc-per-node", str(ranks), "--", __file__, *arguments])


def _run_command(arguments: list[str]) -> None:
    """The command in this process, as a shell starts it."""
    sampling.CHUNK = CHUNK
    sys.argv = ["train_gsm8k.py", *arguments]
    gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)


# ---- work on two ranks ---------------------------------------------------------------------------
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": Adafactor}


def on_two_ranks(work, folder, *arguments):
    """What work(*arguments) returns on rank zero of two, both of which do it.

    folder: for files of the processes.
    """
    start_fork_server()
    inputs = (work, folder, arguments)
    torch.multiprocessing.start_processes(_worker, inputs, nprocs=2, start_method="forkserver")
    return torch.load(folder / "result.pt", weights_only=True)


def _worker(rank, work, folder, arguments):
    # as torchrun does
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    where = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    result = work(*arguments)
    if rank == 0:
        torch.save(result, folder / "result.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that still ends may abort an ordinary exit of the interpreter


def sharded_model(optimizer_name, seed=0, **changes):
    """A model in float64, which FSDP2 would round to float32, and its optimizer."""
    model = tiny_llama(seed)
    with mock.patch.object(training, "MixedPrecisionPolicy", return_value=MixedPrecisionPolicy()):
        training._set_up_passes(model, Settings(**changes))
    return model, OPTIMIZERS[optimizer_name](model.parameters(), lr=1e-2)


if __name__ == "__main__":
    _run_command(sys.argv[1:])
