"""Training steps with verl's own loss function and examples/topr_in_verl.py, in verl's environment; prints JSON.

`ppo_loss` is what verl's workers call with the output of a model and a batch. The model, its optimiser and the batch
are ours: verl's engines need an accelerator.
"""

import json

import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from examples.topr_in_verl import topr_policy_loss  # and registers it
from topr import select_logprobs, topr_loss

PROMPT, MEAN = 5, "seq-mean-token-mean"

torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained("tiny/base", dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ids = torch.randint(5, model.config.vocab_size, (4, 12))
reward, mask = (
    torch.tensor([1.0, -1.0, -0.5, 0.5]),
    torch.arange(7) < torch.tensor([[7], [3], [5], [1]]),
)
attention_mask = torch.cat([torch.ones(4, PROMPT, dtype=torch.bool), mask], dim=1)
settings = {
    "strategy": "fsdp",
    "rollout_n": 1,
    "ppo_micro_batch_size_per_gpu": 2,
    "loss_agg_mode": MEAN,
}
actor = FSDPActorConfig(**settings, policy_loss=PolicyLossConfig(loss_mode="topr"))


def logprobs() -> torch.Tensor:
    """(B, 12): each predicts the next token; the last column predicts nothing."""
    return select_logprobs(model(ids, attention_mask=attention_mask.long()).logits, ids.roll(-1, 1))


def gradient() -> torch.Tensor:
    """That of all parameters, which is then zero."""
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    optimizer.zero_grad()
    return found


response = slice(PROMPT - 1, -1)
logmu = logprobs()[:, response].detach()
columns = {
    "prompts": ids[:, :PROMPT],
    "responses": ids[:, PROMPT:],
    "attention_mask": attention_mask,
    "response_mask": mask,
    "old_log_probs": torch.where(mask, logmu, 0.0),
    "advantages": reward[:, None] * mask,
}
steps, refusals = [], []
for _ in range(4):
    topr_loss(logprobs()[:, response], logmu, reward, mask).backward()
    ours, weights = gradient(), []
    for rows in (slice(0, 1), slice(1, 4)):  # micro-batches
        data = TensorDict(
            {name: column[rows] for name, column in columns.items()}, batch_size=[len(reward[rows])]
        )
        tensordict_utils.assign_non_tensor(
            data, dp_size=1, batch_num_tokens=16, global_batch_size=4
        )
        unpadded = logprobs()[rows][attention_mask[rows]]  # as verl's engines hand it over
        value, metrics = ppo_loss(actor, {"log_probs": unpadded}, data)
        value.backward()
        weights.append(metrics["actor/topr_weight"].aggregate())
    optimizer.step()
    steps.append(
        {"difference": ((gradient() - ours).norm() / ours.norm()).item(), "weights": weights}
    )
ones = torch.ones(2, 3)
for others in ([ones.cumsum(1), ones], [ones, ones, "token-mean"], [ones, ones, MEAN, actor, ones]):
    try:
        topr_policy_loss(-ones, -ones, *others)
    except ValueError as error:
        refusals.append(str(error))
print(json.dumps({"steps": steps, "refusals": refusals}))
