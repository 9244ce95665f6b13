"""Training steps with verl's own loss function and examples/topr_in_verl.py, in verl's environment; prints JSON.

`ppo_loss` is what verl's workers call with the output of a model and a batch. The model, its optimiser and the batch
are ours: verl's engines need an accelerator.
"""

import json
import sys
from pathlib import Path

import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from examples.topr_in_verl import topr_policy_loss  # noqa: E402 - and registers it
from topr import select_logprobs, topr_loss_of_tokens  # noqa: E402

PROMPT, MICRO_BATCHES, STEPS = 5, (slice(0, 1), slice(1, 4)), 4


def main() -> None:
    """Four off-policy steps; each step's gradient beside that of topr.py, and what verl logged."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "base", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(5, model.config.vocab_size, (4, 12))
    lengths, reward = torch.tensor([[7], [3], [5], [1]]), torch.tensor([1.0, -1.0, -0.5, 0.5])
    mask = torch.arange(7) < lengths
    attention_mask = torch.cat([torch.ones(4, PROMPT, dtype=torch.bool), mask], dim=1)

    def logprobs() -> torch.Tensor:  # (B, 12) each predicts the next token; the last column predicts nothing
        logits = model(ids, attention_mask=attention_mask.long()).logits
        return select_logprobs(logits, ids.roll(-1, 1))

    def response(token_logp: torch.Tensor) -> torch.Tensor:
        return token_logp[:, PROMPT - 1 : -1]

    logmu = response(logprobs()).detach()
    settings = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 2}
    mean = "seq-mean-token-mean"
    actor = FSDPActorConfig(**settings, loss_agg_mode=mean, policy_loss=PolicyLossConfig(loss_mode="topr"))
    columns = {
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "attention_mask": attention_mask,
        "response_mask": mask,
        "old_log_probs": torch.where(mask, logmu, 0.0),
        "advantages": reward[:, None] * mask,
    }
    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        topr_loss_of_tokens(response(logprobs()), logmu, reward, mask).backward()
        ours = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        optimizer.zero_grad()
        logged = []
        for rows in MICRO_BATCHES:
            data = TensorDict({name: column[rows] for name, column in columns.items()}, batch_size=[len(reward[rows])])
            tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=16, global_batch_size=4)
            unpadded = logprobs()[rows][attention_mask[rows]]  # as verl's engines hand it over
            value, metrics = ppo_loss(actor, {"log_probs": unpadded}, data)
            value.backward()
            logged.append(metrics["actor/topr_weight"].aggregate())
        verls = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        difference = ((verls - ours).norm() / ours.norm()).item()
        steps.append({"difference": difference, "weights": logged})
        optimizer.step()
    ones = torch.ones(2, 3)
    others = [(-ones, -ones, ones.cumsum(1), ones), (-ones, -ones, ones, ones, "token-mean")]
    others += [(-ones, -ones, ones, ones, mean, actor, ones)]
    print(json.dumps({"steps": steps, "refusals": [refusal(*arguments) for arguments in others]}))


def refusal(*arguments: object) -> str:
    """What the loss says of arguments that are not for it."""
    try:
        return str(topr_policy_loss(*arguments))
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    main()
