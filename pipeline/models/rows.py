"""Batches of completions, those of a prompt sharing its computation: exact, and faster for long prompts.

    prompts      [ padding | x ]        R rows, computed once; what attention needs of them (keys, values) is kept
    completions  [ y | padding ]        B rows, each of which sees its own prompt's keys and values, and itself

Where no prompt has several completions both are one ordinary batch, [ padding | x | y | padding ]. The model's head
runs on no more of a prompt than its last token. The plain counterpart, a padded row for each completion, is
`topr.sequence_logprobs`: same values, same gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from topr import select_logprobs


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
    """A micro-batch: R prompts of at most P tokens, B completions of at most C, in the order of their prompts.

    Of the completions the first len(reward) are learnt from: all, or none where a rank only keeps step.
    """

    shares: bool  # whether prompts are computed on their own; otherwise completion i is prompt i's, in one row
    prompt_ids: Tensor  # (R, P), padded on the left
    prompt_mask: Tensor  # (R, P) 1 on tokens, 0 on padding
    completion_ids: Tensor  # (B, C), padded on the right
    completion_mask: Tensor  # (B, C)
    prompt_of: Tensor  # (B,) which prompt is a completion's
    token_logmu: Tensor  # (B, C) log mu of each token; 0 on padding, NaN where only the sum is known
    logmu: Tensor  # (B,)
    reward: Tensor  # (B,)
    length: Tensor  # (B,)

    @property
    def token_mask(self) -> Tensor:
        """(B, C) True on the tokens that are learnt from."""
        return self.completion_mask[: len(self.reward)].bool()


def collate(
    rows: Sequence[Sequence[Example]], device: torch.device | str = "cpu", shares: bool | None = None
) -> SharedRows:
    """Lay out rows of examples, all examples of a row having the same prompt.

    shares: default whether a row has several; to be given where many processes have to compute alike.

    >>> row = [Example([5, 6], [7, 1], -1.0, 1.0), Example([5, 6], [8, 9, 1], -2.0, -1.0)]
    >>> batch = collate([row])
    >>> batch.prompt_ids.tolist(), batch.completion_ids.tolist(), batch.prompt_of.tolist()
    ([[5, 6]], [[7, 1, 0], [8, 9, 1]], [0, 0])
    """
    examples = [example for row in rows for example in row]
    prompt_ids, prompt_mask = pad([row[0].prompt_ids for row in rows], is_left=True)
    completion_ids, completion_mask = pad([example.completion_ids for example in examples], is_left=False)
    token_logmu = torch.zeros(completion_ids.shape)
    for i, example in enumerate(examples):
        length = len(example.completion_ids)
        token_logmu[i, :length] = torch.tensor(example.token_logmu or [torch.nan] * length)
    prompt_of = [r for r, row in enumerate(rows) for _ in row]
    columns = [[e.logmu for e in examples], [e.reward for e in examples], [len(e.completion_ids) for e in examples]]
    tensors = [prompt_ids, prompt_mask, completion_ids, completion_mask, torch.tensor(prompt_of), token_logmu]
    shares = len(examples) > len(rows) if shares is None else shares
    return SharedRows(shares, *(tensor.to(device) for tensor in [*tensors, *map(torch.tensor, columns)]))


def pad(rows: Sequence[list[int]], is_left: bool) -> tuple[Tensor, Tensor]:
    """The rows as token ids, padded with 0 on one side, and a mask that is 1 on them: two (R, T).

    >>> pad([[5], [6, 7]], is_left=True)[0].tolist()
    [[0, 5], [6, 7]]
    """
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        here = slice(ids.shape[1] - len(row), None) if is_left else slice(len(row))
        ids[i, here], mask[i, here] = torch.tensor(row), 1
    return ids, mask


def without_completions(batch: SharedRows) -> SharedRows:
    """The same rows with nothing to learn: what a rank computes to keep step with ranks that have a row more.

    >>> batch = without_completions(collate([[Example([5, 6], [7, 1], -1.0, 1.0)]]))
    >>> batch.completion_ids.shape, batch.token_mask.shape
    (torch.Size([1, 2]), torch.Size([0, 2]))
    """
    return batch._replace(**{name: getattr(batch, name)[:0] for name in ("token_logmu", "logmu", "reward", "length")})


def token_logprobs(model: PreTrainedModel, batch: SharedRows) -> Tensor:
    """log pi of every completion token over the full vocabulary, in at least float32: (B, C), 0 on padding."""
    token_logp = select_logprobs(predictions(model, batch), batch.completion_ids)
    return torch.where(batch.token_mask, token_logp[: len(batch.reward)], 0.0)


def predictions(model: PreTrainedModel, batch: SharedRows) -> Tensor:
    """The logits that each completion token is predicted by: (B, C, V), in the model's precision."""
    return _behind_prompts(model, batch) if batch.shares else _in_rows(model, batch)


def _in_rows(model: PreTrainedModel, batch: SharedRows) -> Tensor:
    """Prompt and completion in one row."""
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1)
    logits = model(
        input_ids=torch.cat([batch.prompt_ids, batch.completion_ids], dim=1),
        attention_mask=mask,
        position_ids=_positions(mask),
        logits_to_keep=batch.completion_ids.shape[1] + 1,
        use_cache=False,
    ).logits
    return logits[:, :-1]  # the last column would be the token after the end


def _behind_prompts(model: PreTrainedModel, batch: SharedRows) -> Tensor:
    """Each prompt computed once: its last token predicts the first of all its completions."""
    prompts = Cache(layer_class_to_replicate=KeptLayer)
    first = model(
        input_ids=batch.prompt_ids,
        attention_mask=batch.prompt_mask,
        position_ids=_positions(batch.prompt_mask),
        logits_to_keep=1,
        past_key_values=prompts,
        use_cache=True,
    ).logits
    mask = torch.cat([batch.prompt_mask[batch.prompt_of], batch.completion_mask], dim=1)
    others = model(
        input_ids=batch.completion_ids,
        attention_mask=mask,
        position_ids=_positions(mask)[:, batch.prompt_ids.shape[1] :],
        past_key_values=Cache(layers=[BehindPrompt(layer, batch.prompt_of) for layer in prompts.layers]),
        use_cache=True,
    ).logits
    return torch.cat([first[batch.prompt_of], others[:, :-1]], dim=1)


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


class KeptLayer(DynamicLayer):
    """A layer's keys and values, as it computed them last: a recomputed layer (gradient checkpointing) adds nothing."""

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Keep them, with their gradients' way back to the prompt."""
        self.keys, self.values, self.is_initialized = keys, values, True
        return keys, values


class BehindPrompt(DynamicLayer):
    """What a layer sees of its completions: the prompts' keys and values, then their own, which are not kept."""

    def __init__(self, prompts: KeptLayer, prompt_of: Tensor):
        super().__init__()
        self.keys, self.values, self.is_initialized = prompts.keys, prompts.values, True
        self.prompt_of = prompt_of

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """The prompts' for each completion, and its own behind them."""
        return (
            torch.cat([self.keys.index_select(0, self.prompt_of), keys], dim=-2),
            torch.cat([self.values.index_select(0, self.prompt_of), values], dim=-2),
        )


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
