"""Completions of one prompt in one row, so that the prompt is computed once: exact, and faster for long prompts.

    row     = [ padding | prompt | y1 | y2 | ... | yn | padding ]
    y_k sees the prompt and itself, by a mask; its positions go on where the prompt's end.

Prompts are padded on the left, so that completions start in one column and the model's head need only run from the
column before it on. With a single completion a row this is an ordinary padded batch and no such mask is built.
The plain counterpart, one padded row per completion, is `topr.sequence_logprobs`: same values, same gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Example:
    """A trajectory to train on: token ids of prompt and completion, log mu(y|x), and the reward after the baseline."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logmu: float
    reward: float
    number: int = -1  # of the sample it was made from
    token_logmu: Sequence[float] | None = None  # what logmu is the sum of


class SharedRows(NamedTuple):
    """A micro-batch of R rows, T columns, B completions of at most C tokens; its completions are in row order."""

    input_ids: Tensor  # (R, T)
    attention_mask: Tensor  # (R, T), or (R, 1, T, T) added to the scores where rows hold several completions
    position_ids: Tensor  # (R, T)
    kept: int  # columns, counted from the right, whose predictions are needed
    source: Tensor  # (B, C) where each token is predicted: an index into the R * kept kept positions
    token_ids: Tensor  # (B, C)
    token_mask: Tensor  # (B, C) True on tokens, False on padding
    token_logmu: Tensor  # (B, C) log mu of each token; 0 on padding, NaN where only the sum is known
    logmu: Tensor  # (B,)
    reward: Tensor  # (B,)
    length: Tensor  # (B,)


def collate(rows: Sequence[Sequence[Example]], device: torch.device | str = "cpu") -> SharedRows:
    """Lay out rows of examples, all examples of a row having the same prompt.

    >>> row = [Example([5, 6], [7, 1], -1.0, 1.0), Example([5, 6], [8, 9, 1], -2.0, -1.0)]
    >>> batch = collate([row])
    >>> batch.input_ids.tolist(), batch.position_ids.tolist()
    ([[5, 6, 7, 1, 8, 9, 1]], [[0, 1, 2, 3, 2, 3, 4]])
    >>> batch.source.tolist()  # the first token of each completion is predicted by the prompt's last
    [[0, 1, 0], [0, 3, 4]]
    """
    examples = [example for row in rows for example in row]
    start = max(len(row[0].prompt_ids) for row in rows)  # the column where completions begin
    width = start + max(sum(len(example.completion_ids) for example in row) for row in rows)
    longest = max(len(example.completion_ids) for example in examples)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    position_ids = torch.zeros(len(rows), width, dtype=torch.long)
    segment = torch.full((len(rows), width), -1)  # -1 padding, 0 prompt, k the k-th completion
    source = torch.zeros(len(examples), longest, dtype=torch.long)
    token_ids = torch.zeros(len(examples), longest, dtype=torch.long)
    token_mask = torch.zeros(len(examples), longest, dtype=torch.bool)
    token_logmu = torch.zeros(len(examples), longest)
    kept, number = width - start + 1, 0
    for r, row in enumerate(rows):
        size = len(row[0].prompt_ids)
        input_ids[r, start - size : start] = torch.tensor(row[0].prompt_ids)
        position_ids[r, start - size : start] = torch.arange(size)
        segment[r, start - size : start] = 0
        column = start
        for k, example in enumerate(row, start=1):
            length = len(example.completion_ids)
            here = slice(column, column + length)
            input_ids[r, here] = token_ids[number, :length] = torch.tensor(example.completion_ids)
            position_ids[r, here] = torch.arange(size, size + length)
            segment[r, here] = k
            source[number, :length] = r * kept + torch.arange(column - start, column - start + length)
            source[number, 0] = r * kept
            token_mask[number, :length] = True
            token_logmu[number, :length] = torch.tensor(example.token_logmu or [torch.nan] * length)
            column, number = column + length, number + 1
    mask = (segment >= 0).long() if all(len(row) == 1 for row in rows) else _sharing_mask(segment)
    columns = [[e.logmu for e in examples], [e.reward for e in examples], [len(e.completion_ids) for e in examples]]
    tensors = [source, token_ids, token_mask, token_logmu, *map(torch.tensor, columns)]
    return SharedRows(
        input_ids.to(device), mask.to(device), position_ids.to(device), kept, *(t.to(device) for t in tensors)
    )


def without_completions(batch: SharedRows) -> SharedRows:
    """The same rows with nothing to learn: what a rank computes to keep step with ranks that have a row more.

    >>> batch = without_completions(collate([[Example([5, 6], [7, 1], -1.0, 1.0)]]))
    >>> batch.input_ids.shape, batch.token_ids.shape
    (torch.Size([1, 4]), torch.Size([0, 2]))
    """
    columns = ("source", "token_ids", "token_mask", "token_logmu", "logmu", "reward", "length")
    return batch._replace(**{name: getattr(batch, name)[:0] for name in columns})


def _sharing_mask(segment: Tensor) -> Tensor:
    """(R, 1, T, T), 0 where a token may look and -inf elsewhere: at earlier tokens of the prompt or of its own kind.

    Padding looks at padding, since a token that may look nowhere would turn into NaN.
    """
    own, other = segment[:, :, None], segment[:, None, :]
    is_earlier = torch.ones(segment.shape[1], segment.shape[1], dtype=torch.bool).tril()
    allowed = is_earlier & ((other == own) | (other == 0))
    return torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)[:, None]


def token_logprobs(model: PreTrainedModel, batch: SharedRows) -> Tensor:
    """log pi of every completion token over the full vocabulary, in at least float32: (B, C), 0 on padding."""
    mask = batch.attention_mask
    out = model(
        input_ids=batch.input_ids,
        attention_mask=mask.to(model.dtype) if mask.ndim == 4 else mask,
        position_ids=batch.position_ids,
        logits_to_keep=batch.kept,
        use_cache=False,
    )
    logits = out.logits.flatten(0, 1)  # (R * kept, V)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    token_logp = logits[batch.source, batch.token_ids] - logits.logsumexp(-1)[batch.source]
    return torch.where(batch.token_mask, token_logp, 0.0)


def sequence_logprobs(model: PreTrainedModel, batch: SharedRows) -> Tensor:
    """log pi(y|x) of every completion: (B,). To be handed to `topr.train` as its `logprobs`."""
    return token_logprobs(model, batch).sum(-1)


TokenLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(token_logp, token_logmu (B, C), reward (B,), mask (B, C)) -> the loss, a mean over the B completions"""


def logprobs_with_gradient_of(token_loss: TokenLoss) -> Callable[[PreTrainedModel, SharedRows], Tensor]:
    """`sequence_logprobs`, the same values, but made so that naive REINFORCE of them has the gradient of `token_loss`.

    So a loss that looks at single tokens trains in `topr.train`, which knows sequences only. What a token counts is
    read off the loss's gradient, batch by batch. The weights that `train` reports are those of naive REINFORCE: 1.

    >>> from types import SimpleNamespace
    >>> logits = torch.zeros(1, 3, 4, requires_grad=True)
    >>> batch = collate([[Example([1], [2, 3], -2.0, -1.0, token_logmu=[-1.0, -1.0])]])
    >>> model = lambda **_: SimpleNamespace(logits=logits)
    >>> model.dtype = torch.float32
    >>> logp = logprobs_with_gradient_of(lambda logp, logmu, reward, mask: logp[:, 0].sum())(model, batch)
    >>> logp.item() == 2 * torch.tensor(0.25).log().item()  # log pi(y|x), yet only its first token has a gradient
    True
    >>> [bool(row.any()) for row in torch.autograd.grad(logp.sum(), logits)[0][0]]
    [True, False, False]
    """

    def logprobs(model: PreTrainedModel, batch: SharedRows) -> Tensor:
        token_logp = token_logprobs(model, batch)
        leaf = token_logp.detach().requires_grad_()
        loss = token_loss(leaf, batch.token_logmu, batch.reward, batch.token_mask.to(leaf.dtype))
        [gradient] = torch.autograd.grad(loss, leaf)
        # naive REINFORCE multiplies the gradient of each log pi(y|x) with -reward / length, and takes the mean
        naive = -torch.where(batch.reward == 0, torch.inf, batch.reward) / batch.length / len(batch.reward)
        weighted = (gradient / naive[:, None] * token_logp).sum(-1)
        return weighted + (token_logp.sum(-1) - weighted).detach()

    return logprobs


def batches_within(tokens: int, widths: Sequence[int]) -> Iterator[slice]:
    """Consecutive runs of rows that, padded to their widest, have at most `tokens` tokens; a row at least.

    >>> list(batches_within(12, widths=[3, 4, 4, 5, 20]))
    [slice(0, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    start, widest = 0, 0
    for i, width in enumerate(widths):
        widest = max(widest, width)
        if i > start and (i + 1 - start) * widest > tokens:
            yield slice(start, i)
            start, widest = i, width
    yield slice(start, len(widths))
