"""Token log-probabilities without materialising full logits: the head and its backward pass by vocabulary slices.

With a vocabulary of 128,256 and 512 tokens, the logits take 263 MB in float32, and so do their softmax and their
gradient. Here the logits of a slice of the vocabulary are computed, used and dropped; the backward pass recomputes
them. What remains is the gradient of the head's weights, (V, H), written slice by slice.

Logits are float32 where the model computes in bfloat16: rounding them would double the variance of log pi - log mu.

    z = hidden @ weight.T,  logp_i = z_i[y_i] - log sum_v exp z_i[v],  d logp_i / d z_i[v] = [v = y_i] - softmax(z_i)[v]
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from pipeline.models.language_model import SharedRows, predictions
from pipeline.records import InputError

SLICE = 4_096  # tokens of the vocabulary at a time
PLAIN_HEADS = ("llama", "mistral", "qwen2", "qwen3")  # whose logits are hidden @ weight.T, and nothing after it


def selected_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(hidden @ weight.T) at `tokens`: hidden (N, H), weight (V, H), tokens (N,); (N,), at least float32.

    >>> selected_logprobs(torch.zeros(1, 2), torch.ones(4, 2), torch.tensor([3])).exp()
    tensor([0.2500])
    """
    return _SelectedLogprobs.apply(hidden, weight, tokens)


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
        chosen = _precise(hidden.new_zeros(len(tokens)))
        log_sum = torch.full_like(chosen, -torch.inf)
        for part in _slices(weight):
            logits = linear(_precise(hidden), _precise(weight[part]))  # (N, slice)
            here, rows = _chosen_here(tokens, part)
            chosen[rows] = logits[rows, here]
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(-1))
        ctx.save_for_backward(hidden, weight, tokens, log_sum)
        return chosen - log_sum

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, tokens, log_sum = ctx.saved_tensors
        of_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype)
        of_weight = torch.empty_like(weight)
        for part in _slices(weight):
            of_logits = linear(_precise(hidden), _precise(weight[part]))  # (N, slice), in place made its gradient
            of_logits.sub_(log_sum[:, None]).exp_().mul_(-gradient[:, None])  # - softmax * gradient
            here, rows = _chosen_here(tokens, part)
            of_logits[rows, here] += gradient[rows]
            of_logits = of_logits.to(weight.dtype)
            of_hidden += of_logits @ weight[part]
            torch.mm(of_logits.T, hidden, out=of_weight[part])
        return of_hidden.to(hidden.dtype), of_weight, None


def _slices(weight: Tensor) -> Iterator[slice]:
    return (slice(start, start + SLICE) for start in range(0, len(weight), SLICE))


def _chosen_here(tokens: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Index within this slice of the vocabulary of the tokens that lie in it, and their rows: (M,), (M,)."""
    rows = ((tokens >= part.start) & (tokens < part.stop)).nonzero().squeeze(-1)
    return tokens[rows] - part.start, rows


def _precise(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def token_logprobs(model: PreTrainedModel, batch: SharedRows) -> Tensor:
    """log pi of every completion token, (B, C), 0 on padding: as `language_model.token_logprobs`."""
    check_head(model)
    head = model.get_output_embeddings()
    head.forward = torch.clone  # so that the model returns hidden states; no view: FSDP2 hangs its hooks on them
    try:
        hidden = predictions(model, batch)[: len(batch.reward)]  # (B, C, H)
    finally:
        del head.forward
    here = batch.completion_mask[: len(batch.reward)].bool()  # (B, C)
    tokens = batch.completion_ids[: len(batch.reward)]
    token_logp = hidden.new_zeros(here.shape, dtype=_precise(hidden).dtype)
    token_logp[here] = selected_logprobs(hidden[here], head.weight, tokens[here])
    return token_logp


def check_head(model: PreTrainedModel) -> None:
    """InputError where the model does more with its logits than a product, or is not known not to."""
    if model.config.model_type not in PLAIN_HEADS:
        raise InputError(f"--sliced-head: is for {', '.join(PLAIN_HEADS)}; this model is a {model.config.model_type}")
