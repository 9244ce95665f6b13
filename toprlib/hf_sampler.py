"""Sampling in this process with a model of `transformers`, faster than with `generate`.

There are three reasons. A prompt is computed once, and all of its completions start from
copies of its keys and values. A completion that is finished leaves its batch at once. New keys and
values are written into memory that is allocated beforehand.

It samples with temperature, top-k and top-p, and works for models whose only state is keys and
values; other options of `generate` are left out.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, DynamicLayer

from toprlib.language_model import LanguageModel
from toprlib.records import InputError, Prompt, Sample

if TYPE_CHECKING:
    from toprlib.sampling import SamplingParameters

MAX_BATCH_TOKENS = 40_000  # rows x (prompt + new tokens) of a batch: memory and speed; ours
MAX_THREADS = 4  # batches that are computed at a time on a CPU; ours


class Row(NamedTuple):
    """A completion to sample: a row of a batch."""

    prompt: int  # index of its prompt
    seed: int  # of its random numbers


def sample_completions(
    lm: LanguageModel,
    parameters: "SamplingParameters",
    prompts: Sequence[Prompt],
    n: int,
    seed: int,
) -> Iterator[list[tuple[int, Sample]]]:
    """Yields n completions of each prompt, not graded, with the index of the prompt, by batches.

    Completion j of prompt i uses random numbers of its own, with the seed `seed + i * n + j`: up to
    rounding, it does not depend on what else is in its batch.
    """
    batches = _make_batches(prompts, n, seed, parameters.max_new_tokens)
    threads = torch.get_num_threads()
    # For a small model, one thread is as fast as several: they compute different batches instead.
    workers = min(threads, MAX_THREADS) if lm.model.device.type == "cpu" else 1
    pool = ThreadPoolExecutor(workers, "sampling", torch.set_num_threads, (threads // workers,))
    try:
        futures = [pool.submit(_sample_rows, lm, parameters, prompts, rows) for rows in batches]
        for rows, future in zip(batches, futures, strict=True):
            finished = []
            for row, (token_ids, finish_reason) in zip(rows, future.result(), strict=True):
                prompt = prompts[row.prompt]
                sample = Sample(
                    problem_id=prompt.problem.id,
                    prompt=prompt.text,
                    completion=lm.text(token_ids),
                    token_ids=token_ids,
                    finish_reason=finish_reason,
                )
                finished.append((row.prompt, sample))
            yield finished
    finally:
        # After Ctrl-C, which only the main thread sees, the others would finish their batches.
        hook = lm.model.register_forward_pre_hook(_raise_cancelled)
        pool.shutdown(cancel_futures=True)
        hook.remove()
        torch.set_num_threads(threads)


def _raise_cancelled(*_: Any) -> NoReturn:
    raise InterruptedError("sampling was cancelled")


def _make_batches(
    prompts: Sequence[Prompt], n: int, seed: int, max_new_tokens: int
) -> list[list[Row]]:
    """The rows of all completions in batches, from the shortest prompt to the longest."""
    lengths = [len(prompt.ids) for prompt in prompts]
    rows = []
    for i in sorted(range(len(prompts)), key=lengths.__getitem__):
        for j in range(n):
            rows.append(Row(prompt=i, seed=seed + i * n + j))
    widths = [lengths[row.prompt] + max_new_tokens for row in rows]
    return [rows[batch] for batch in batch_slices(widths, MAX_BATCH_TOKENS)]


def batch_slices(widths: Sequence[int], max_tokens: int) -> Iterator[slice]:
    """Splits rows into consecutive batches.

    A batch has at most `max_tokens` tokens when its rows are padded to the widest, or one row.

    >>> list(batch_slices([3, 4, 4, 5, 20], max_tokens=12))
    [slice(0, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    start = 0
    widest = 0
    for i, width in enumerate(widths):
        widest = max(widest, width)
        if i > start and (i + 1 - start) * widest > max_tokens:
            yield slice(start, i)
            start = i
            widest = width
    if start < len(widths):
        yield slice(start, len(widths))


def _sample_rows(
    lm: LanguageModel,
    parameters: "SamplingParameters",
    prompts: Sequence[Prompt],
    rows: Sequence[Row],
) -> list[tuple[list[int], str]]:
    """The completions of a batch: see `sample_batch`."""
    noise = []
    for row in rows:
        generator = torch.Generator().manual_seed(row.seed)
        noise.append(torch.rand(parameters.max_new_tokens, generator=generator))
    indices = torch.tensor([row.prompt for row in rows])
    distinct, prompt_of = indices.unique_consecutive(return_inverse=True)
    prompt_ids = [prompts[i].ids for i in distinct]
    return sample_batch(lm, parameters, prompt_ids, prompt_of, torch.stack(noise))


@torch.inference_mode()
def sample_batch(
    lm: LanguageModel,
    parameters: "SamplingParameters",
    prompt_ids: Sequence[list[int]],
    prompt_of: Tensor,
    noise: Tensor,
) -> list[tuple[list[int], str]]:
    """The token ids of B completions, and why each of them ends.

    prompt_ids: token ids of P prompts. prompt_of: (B,) index of each row's prompt. noise: (B, T),
    uniform in [0, 1), a number for each token; T is the most tokens that a completion may have. A
    completion ends with "stop", or with "length" if it has T tokens and no end. Raises InputError
    if the probabilities of a token are NaN.
    """
    device = lm.model.device
    noise = noise.to(device)
    tokens = torch.zeros_like(noise, dtype=torch.long)  # (B, T)
    length = torch.zeros(len(noise), dtype=torch.long, device=device)  # (B,) 0: not finished
    active, logits = _compute_prompts(lm, prompt_ids, prompt_of.to(device), noise.shape[1])
    no_token = logits.shape[1]  # V, which `choose_tokens` returns where all probabilities are NaN
    ends = torch.tensor([*sorted(lm.ends), no_token], dtype=torch.long, device=device)
    for t in range(noise.shape[1]):
        if t > 0:
            logits = active.next_logits(lm.model)  # (A, V)
        p = filtered_probabilities(logits, parameters)  # (A, V)
        token = choose_tokens(p, noise[active.row, t])  # (A,)
        tokens[active.row, t] = token
        is_finished = torch.isin(token, ends)  # (A,)
        if parameters.stop:
            is_finished |= has_stop(lm, tokens[active.row, : t + 1], parameters.stop)
        length[active.row[is_finished]] = t + 1
        if is_finished.all():
            break
        active.append(token)
        if is_finished.any():
            active.remove(is_finished)
    if (tokens == no_token).any():
        message = f"{parameters.temperature}: the probabilities of a model's tokens are NaN"
        fix = "raise the temperature; if it is 1, choose another model"
        raise InputError(f"{message}; {fix}", option="--temperature")
    completions = []
    for token_ids, size in zip(tokens.tolist(), length.tolist(), strict=True):
        completions.append((token_ids[:size], "stop") if size else (token_ids, "length"))
    return completions


@dataclass
class ActiveRows:
    """The A rows of a batch that are not finished; t tokens of each are in the cache."""

    row: Tensor  # (A,) indices among all rows of the batch
    token: Tensor  # (A, 1) the next token to compute
    attention_mask: Tensor  # (A, t + 1) 0 on the padding before a prompt
    position: Tensor  # (A, 1) of the next token, from 0 at the start of the prompt
    cache: DynamicCache  # keys and values, (A, heads, t, size) in each layer

    def next_logits(self, model: torch.nn.Module) -> Tensor:
        """The logits after the next token, (A, V)."""
        return _last_logits(model, self.token, self.attention_mask, self.position, self.cache)

    def append(self, token: Tensor) -> None:
        """Set the next token, (A,)."""
        self.token = token[:, None]
        self.attention_mask = torch.cat([self.attention_mask, torch.ones_like(self.token)], dim=1)
        self.position = self.position + 1

    def remove(self, is_finished: Tensor) -> None:
        """Remove rows, (A,). The last rows move to their places, so that few rows are copied."""
        left = (~is_finished).nonzero()[:, 0]
        kept = torch.arange(len(left), device=left.device)
        kept[is_finished[: len(left)]] = left[left >= len(left)]
        self.cache.batch_select_indices(kept)
        self.row = self.row[kept]
        self.token = self.token[kept]
        self.attention_mask = self.attention_mask[kept]
        self.position = self.position[kept]


def _compute_prompts(
    lm: LanguageModel, prompt_ids: Sequence[list[int]], prompt_of: Tensor, max_new_tokens: int
) -> tuple[ActiveRows, Tensor]:
    """Compute each of P prompts once. Returns B rows that start from them, and logits (B, V)."""
    inputs = {"input_ids": prompt_ids}
    padded = lm.tokenizer.pad(inputs, padding_side="left", return_tensors="pt")
    tokens = padded["input_ids"].to(lm.model.device)  # (P, longest prompt)
    mask = padded["attention_mask"].to(lm.model.device)  # (P, longest prompt)
    position = (mask.cumsum(-1) - 1).clamp_min(0)  # (P, longest prompt)
    cache = DynamicCache(config=lm.model.config)
    logits = _last_logits(lm.model, tokens, mask, position, cache)  # (P, V)
    cache.batch_select_indices(prompt_of)  # from P to B rows
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:  # a layer with a sliding window is of a subclass
            cache.layers[i] = PreallocatedKVLayer(layer, max_new_tokens)
    active = ActiveRows(
        row=torch.arange(len(prompt_of), device=lm.model.device),
        token=tokens[prompt_of, -1:],  # computed already; `append` replaces it
        attention_mask=mask[prompt_of],
        position=position[prompt_of, -1:],
        cache=cache,
    )
    return active, logits[prompt_of]


def _last_logits(
    model: torch.nn.Module, tokens: Tensor, mask: Tensor, position: Tensor, cache: DynamicCache
) -> Tensor:
    """The logits after the last of the tokens, (rows, V), whose keys and values join the cache."""
    output = model(
        tokens,
        attention_mask=mask,
        position_ids=position,
        past_key_values=cache,
        logits_to_keep=1,
    )
    return output.logits[:, -1].float()


def filtered_probabilities(logits: Tensor, parameters: "SamplingParameters") -> Tensor:
    """The probabilities (A, V) of logits (A, V); 0 for tokens that top-k and top-p leave out.

    What top-p leaves out is missing from the sum, which is then below 1.

    >>> from toprlib.sampling import SamplingParameters
    >>> logits = torch.tensor([[0.5, 0.1, 0.4]]).log()
    >>> filtered_probabilities(logits, SamplingParameters(top_k=2))
    tensor([[0.5556, 0.0000, 0.4444]])
    >>> filtered_probabilities(logits, SamplingParameters(top_p=0.8))
    tensor([[0.5000, 0.0000, 0.4000]])
    """
    logits = logits / parameters.temperature
    if 0 < parameters.top_k < logits.shape[-1]:
        largest = logits.topk(parameters.top_k, sorted=False).values  # (A, top_k)
        smallest = largest.amin(-1, keepdim=True)  # (A, 1)
        logits = logits.masked_fill(logits < smallest, -math.inf)
    p = logits.softmax(-1)
    if parameters.top_p < 1:
        sorted_p, order = p.sort(descending=True)
        p_of_likelier = sorted_p.cumsum(-1) - sorted_p  # (A, V) of all tokens that are likelier
        is_kept = p_of_likelier < parameters.top_p
        is_kept[:, 0] = True  # the likeliest token, even where float32 rounds top-p to 0
        sorted_p *= is_kept
        p = torch.zeros_like(p).scatter(-1, order, sorted_p)
    return p


def choose_tokens(p: Tensor, noise: Tensor) -> Tensor:
    """Invert the cumulative distribution: p (A, V), noise (A,) uniform in [0, 1); returns (A,).

    >>> p = torch.tensor([[0.5, 0.0, 0.4]])  # whose sum may be below 1
    >>> [choose_tokens(p, torch.tensor([noise])).item() for noise in (0.0, 0.55, 0.56)]
    [0, 0, 2]
    """
    cumulative = p.cumsum(-1)  # (A, V)
    threshold = noise[:, None] * cumulative[:, -1:]  # (A, 1)
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


def has_stop(lm: LanguageModel, tokens: Tensor, stop: Sequence[str]) -> Tensor:
    """Whether a stop string is complete, (A,), in completions (A, t) that had none a token ago."""
    # It began within the last tokens: a token may have as little as a quarter of a character.
    last = 4 * max(len(string) for string in stop)
    texts = [lm.text(token_ids) for token_ids in tokens[:, -last:].tolist()]
    flags = [any(string in text for string in stop) for text in texts]
    return torch.tensor(flags, device=tokens.device)


class PreallocatedKVLayer(DynamicLayer):
    """A layer's keys and values, (A, heads, t, size), in buffers with space for more tokens.

    Only what is new or moves is copied; `DynamicLayer` copies everything for each token.
    """

    def __init__(self, layer: DynamicLayer, max_new_tokens: int) -> None:
        super().__init__()
        # Zeros after the last token: (A, heads, t + max_new_tokens, size).
        self.buffers = [pad(x, (0, 0, 0, max_new_tokens)) for x in (layer.keys, layer.values)]
        self.keys = layer.keys
        self.values = layer.values
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of one token, (A, heads, 1, size); returns those of all."""
        t = self.keys.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, t : t + 1] = states
        self.keys, self.values = (buffer[:, :, : t + 1] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order. Rows that keep their place are not copied."""
        places = torch.arange(len(indices), device=indices.device)
        moved = (indices != places).nonzero()[:, 0]
        for buffer in self.buffers:
            buffer[moved] = buffer[indices[moved]]
        self.buffers = [buffer[: len(indices)] for buffer in self.buffers]
