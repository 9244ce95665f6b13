"""Sampling in this process with a model of `transformers`, twice as fast as with `generate`.

A prompt is computed once, and all of its completions start from copies of its keys and values. A
completion that is finished leaves its batch at once. New keys and values are written into memory
that is allocated beforehand. Each completion has random numbers of its own.
"""

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, DynamicLayer

from toprlib.language_model import LanguageModel, free_gpu, load_model
from toprlib.records import Completion, Engine, Prompt
from toprlib.settings import Settings

# The new name, `cache`, is none that transformers 5.19 knows.
warnings.filterwarnings("ignore", "`past_key_values` is deprecated")

MAX_BATCH_TOKENS = 40_000  # rows x (prompt + new tokens) of a batch on a CPU
MAX_CACHE_SHARE = 0.25  # of a GPU's free memory, for the keys and values of a batch
MAX_THREADS = 4  # batches that are computed at a time on a CPU

Row = tuple[int, int]  # a completion to sample: index of its prompt, seed of its random numbers


@contextmanager
def hf_engine(
    lm: LanguageModel, model: str, settings: Settings, stop: Sequence[str]
) -> Iterator[Engine]:
    """An engine in this process. Its first call loads the weights; the end of the block frees them.

    lm: without weights. model: folder or hub name of the weights. stop: strings that end a
    completion.
    """
    loaded: list[LanguageModel] = []

    def generate(
        prompts: Sequence[Prompt], n: int, seed: int, temperature: float = settings.temperature
    ) -> Iterator[list[Completion]]:
        if not loaded:
            loaded.append(lm._replace(model=load_model(model)))
        seeds = range(seed, seed + n * len(prompts))
        yield from sample_completions(loaded[0], settings, stop, prompts, seeds, temperature)

    try:
        yield Engine(generate)
    finally:
        loaded.clear()
        free_gpu()


def sample_completions(
    lm: LanguageModel,
    settings: Settings,
    stop: Sequence[str],
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    temperature: float,
) -> Iterator[list[Completion]]:
    """Yields completions of the prompts, in lists of those that are finished together.

    temperature: 0 for the most probable tokens; that of the settings is ignored. seeds: one for
    each completion, those of a prompt together. A completion uses random numbers of
    its own: up to rounding, it does not depend on what else is in its batch.
    """
    n = len(seeds) // len(prompts)
    threads = torch.get_num_threads()
    # For a small model, one thread is as fast as several: they compute different batches instead.
    workers = min(threads, MAX_THREADS) if lm.model.device.type == "cpu" else 1
    max_rows = math.ceil(len(seeds) / workers)
    batches: list[list[Row]] = [[]]  # from the shortest prompt to the longest
    max_tokens = MAX_BATCH_TOKENS
    if lm.model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(lm.model.device)
        max_tokens = MAX_CACHE_SHARE * free / _bytes_per_token(lm.model)
    lengths = [len(prompt.ids) for prompt in prompts]
    for i in sorted(range(len(prompts)), key=lengths.__getitem__):
        width = lengths[i] + settings.max_new_tokens
        for seed in seeds[i * n : (i + 1) * n]:
            is_full = (len(batches[-1]) + 1) * width > max_tokens
            if batches[-1] and (is_full or len(batches[-1]) == max_rows):
                batches.append([])
            batches[-1].append((i, seed))
    pool = ThreadPoolExecutor(workers, "sampling", torch.set_num_threads, (threads // workers,))
    try:
        sample_batch = partial(_sample_batch, lm, settings, stop, prompts, temperature=temperature)
        yield from pool.map(sample_batch, batches)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


@torch.inference_mode()
def _bytes_per_token(model: torch.nn.Module) -> int:
    """The memory of a token's keys and values."""
    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.inference_mode()
def _sample_batch(
    lm: LanguageModel,
    settings: Settings,
    stop: Sequence[str],
    prompts: Sequence[Prompt],
    rows: Sequence[Row],
    temperature: float,
) -> list[Completion]:
    """The completions of a batch of B rows.

    A completion ends with "stop", or with "length" if it has T tokens and no end.
    """
    device = lm.model.device
    size = settings.max_new_tokens  # T
    noise = _draw_noise(rows, size).to(device)  # (B, T)
    tokens = torch.zeros(len(rows), size, dtype=torch.long, device=device)  # (B, T)
    length = torch.zeros(len(rows), dtype=torch.long, device=device)  # (B,) 0: not finished
    ends = torch.tensor(sorted(lm.ends), device=device)
    active = torch.arange(len(rows), device=device)  # (A,) the rows that are not finished
    logits, mask, cache = _compute_prompts(lm, prompts, rows, size)
    width = mask.shape[1] - size  # of the prompts
    token = tokens[:, 0]  # (A,) the last one; none yet
    for t in range(size):
        if t > 0:
            seen = mask[:, : width + t]  # (A, L + t)
            position = seen.sum(1, keepdim=True) - 1  # (A, 1)
            logits = _last_logits(lm.model, token[:, None], seen, position, cache)  # (A, V)
        if temperature == 0:
            token = logits.argmax(-1)  # (A,)
        else:
            p = filtered_probabilities(logits / temperature, settings.top_k)  # (A, V)
            token = sample_tokens(p, noise[active, t])  # (A,)
        tokens[active, t] = token
        is_finished = torch.isin(token, ends)  # (A,)
        if stop:
            is_finished |= _has_stop(lm, tokens[active, : t + 1], stop)
        length[active[is_finished]] = t + 1
        if is_finished.all():
            break
        if is_finished.any():
            kept = _fill_gaps(is_finished)
            active = active[kept]
            mask = mask[kept]
            token = token[kept]
            cache.batch_select_indices(kept)
    return _to_completions(lm, rows, tokens.tolist(), length.tolist())


def _draw_noise(rows: Sequence[Row], size: int) -> Tensor:
    """Random numbers of each row's own seed, uniform in [0, 1): (B, size)."""
    noise = []
    for _, seed in rows:
        noise.append(torch.rand(size, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(noise)


def _to_completions(
    lm: LanguageModel, rows: Sequence[Row], tokens: list[list[int]], lengths: list[int]
) -> list[Completion]:
    """The completions of rows from their tokens. lengths: 0 for a row that did not end."""
    completions = []
    for (prompt, _), token_ids, length in zip(rows, tokens, lengths, strict=True):
        ids = token_ids[:length] if length else token_ids
        reason = "stop" if length else "length"
        fields = {"completion": lm.text(ids), "token_ids": ids, "finish_reason": reason}
        completions.append((prompt, fields))
    return completions


def _compute_prompts(
    lm: LanguageModel, prompts: Sequence[Prompt], rows: Sequence[Row], max_new_tokens: int
) -> tuple[Tensor, Tensor, DynamicCache]:
    """Compute each prompt of a batch once.

    Returns the logits after them, (B, V), the mask of all tokens, (B, L + T), and the cache.
    """
    indices = torch.tensor([prompt for prompt, _ in rows])
    distinct, prompt_of = indices.unique_consecutive(return_inverse=True)
    inputs = {"input_ids": [prompts[i].ids for i in distinct]}
    padded = lm.tokenizer.pad(
        inputs, padding_side="left", return_attention_mask=True, return_tensors="pt"
    ).to(lm.model.device)
    mask = padded["attention_mask"]  # (P, L)
    position = (mask.cumsum(-1) - 1).clamp_min(0)  # (P, L)
    cache = DynamicCache(config=lm.model.config)
    logits = _last_logits(lm.model, padded["input_ids"], mask, position, cache)  # (P, V)
    prompt_of = prompt_of.to(lm.model.device)
    cache.batch_select_indices(prompt_of)  # from P to B rows
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:  # a layer with a sliding window is of a subclass
            cache.layers[i] = PreallocatedLayer(layer, max_new_tokens)
    return logits[prompt_of], pad(mask[prompt_of], (0, max_new_tokens), value=1), cache


def _fill_gaps(is_finished: Tensor) -> Tensor:
    """The indices of the rows that remain, where the last rows fill gaps: few rows are copied.

    >>> _fill_gaps(torch.tensor([False, True, False, False]))
    tensor([0, 3, 2])
    """
    left = (~is_finished).nonzero()[:, 0]
    kept = torch.arange(len(left), device=left.device)
    kept[is_finished[: len(left)]] = left[left >= len(left)]
    return kept


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


def filtered_probabilities(logits: Tensor, top_k: int) -> Tensor:
    """The probabilities (A, V) of logits (A, V), among the top_k largest; 0: among all.

    >>> filtered_probabilities(torch.tensor([[0.5, 0.1, 0.4]]).log(), top_k=2)
    tensor([[0.5556, 0.0000, 0.4444]])
    """
    if 0 < top_k < logits.shape[-1]:
        largest = logits.topk(top_k, sorted=False).values  # (A, top_k)
        smallest = largest.amin(-1, keepdim=True)  # (A, 1)
        logits = logits.masked_fill(logits < smallest, -math.inf)
    return logits.softmax(-1)


def sample_tokens(p: Tensor, u: Tensor) -> Tensor:
    """Invert the cumulative distribution: p (A, V), u (A,) uniform in [0, 1); returns (A,).

    >>> p = torch.tensor([[0.5, 0.0, 0.5]])
    >>> [sample_tokens(p, torch.tensor([u])).item() for u in (0.0, 0.49, 0.51)]
    [0, 0, 2]
    """
    cumulative = p.cumsum(-1)  # (A, V)
    threshold = u[:, None] * cumulative[:, -1:]  # (A, 1) sums are 1 up to rounding
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


def _has_stop(lm: LanguageModel, tokens: Tensor, stop: Sequence[str]) -> Tensor:
    """Whether a stop string is complete, (A,), in completions (A, t) that had none a token ago."""
    # It began within the last tokens: a token may have as little as a quarter of a character.
    last = 4 * max(len(string) for string in stop)
    texts = [lm.text(token_ids) for token_ids in tokens[:, -last:].tolist()]
    pattern = re.compile("|".join(map(re.escape, stop)))
    flags = [pattern.search(text) is not None for text in texts]
    return torch.tensor(flags, device=tokens.device)


class PreallocatedLayer(DynamicLayer):
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
