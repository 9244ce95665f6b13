"""Optimizer steps with verl's own `ppo_loss` and examples/topr_in_verl.py; prints JSON.

It runs in verl's environment. verl's workers call `ppo_loss` with a model's output and a batch.
Model, optimizer and batch are made here: verl's engines need an accelerator.
"""

import json

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from examples import topr_in_verl  # registers the loss
from topr import topr_loss

PROMPT = 5  # tokens of each prompt
RESPONSE = slice(PROMPT - 1, -1)  # columns of logits that predict the response
LENGTHS = torch.tensor([[7], [3], [5], [1]])  # of the responses
MICRO_BATCHES = (slice(0, 1), slice(1, 4))  # the second one has both negatives

torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained("tiny/base", dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ids = torch.randint(5, model.config.vocab_size, (4, 12))  # (B, PROMPT + T)
advantage = torch.tensor([1.0, -1.0, -0.5, 0.5])  # (B,)
topr_in_verl.EFFECTIVE_PROPORTION = 0.75
reward = torch.tensor([1.5, -0.5, -0.25, 0.75])  # (B,) positives count 1.5 times, others 0.5 times
mask = torch.arange(7) < LENGTHS  # (B, T)
attention_mask = torch.cat([torch.ones(4, PROMPT, dtype=torch.bool), mask], dim=1)
actor = FSDPActorConfig(
    strategy="fsdp",
    rollout_n=1,
    ppo_micro_batch_size_per_gpu=2,
    loss_agg_mode="token-mean",  # verl's default, which has no effect
    policy_loss=PolicyLossConfig(loss_mode="topr"),
)


def next_token_logprobs() -> Tensor:
    """(B, PROMPT + T): each column predicts the token after it; the last one predicts nothing."""
    logp = model(ids, attention_mask=attention_mask.long()).logits.log_softmax(-1)
    return logp.gather(-1, ids.roll(-1, 1)[..., None])[..., 0]


def take_gradient() -> Tensor:
    """The gradient of all parameters, which is then zero."""
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    optimizer.zero_grad()
    return gradient


def make_data(rows: slice) -> TensorDict:
    """A micro-batch as verl's workers hand it over: four completions in the batch, one process."""
    columns = {
        "prompts": ids[rows, :PROMPT],
        "responses": ids[rows, PROMPT:],
        "attention_mask": attention_mask[rows],
        "response_mask": mask[rows],
        "old_log_probs": torch.where(mask, token_logmu, 0.0)[rows],
        "advantages": (advantage[:, None] * mask)[rows],
    }
    data = TensorDict(columns, batch_size=[len(mask[rows])])
    sizes = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": 4}
    tensordict_utils.assign_non_tensor(data, **sizes)
    return data


def verl_step() -> list[float]:
    """Backward passes over the micro-batches. Returns the mean weight of each."""
    weights = []
    for rows in MICRO_BATCHES:
        unpadded = next_token_logprobs()[rows][attention_mask[rows]]
        value, metrics = ppo_loss(actor, {"log_probs": unpadded}, make_data(rows))
        value.backward()
        weights.append(metrics["actor/topr_weight"].aggregate())
    return weights


def refuses(*arguments: object) -> bool:
    """Whether the loss raises ValueError."""
    try:
        topr_in_verl.topr_policy_loss(*arguments)
    except ValueError:
        return True
    return False


token_logmu = next_token_logprobs()[:, RESPONSE].detach()  # (B, T)
steps = []
for _ in range(4):
    topr_loss(next_token_logprobs()[:, RESPONSE], token_logmu, reward, mask).backward()
    expected = take_gradient()
    weights = verl_step()
    optimizer.step()
    difference = (take_gradient() - expected).norm() / expected.norm()
    steps.append({"difference": difference.item(), "weights": weights})

ones = torch.ones(2, 3)
refusals = [
    refuses(-ones, -ones, ones.cumsum(1), ones, "token-mean", actor),  # advantages that differ
    refuses(-ones, -ones, ones, ones, "token-mean", actor, ones),  # weights of the rollout
    refuses(-ones, -ones, ones, ones, "token-mean", actor),
]
print(json.dumps({"steps": steps, "refusals": refusals}))
