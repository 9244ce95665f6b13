"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft: W + B A; only A and B are trained.

A is random and B is zero at the start of each iteration, so pi = mu. The first iteration samples
from the base model, later ones from the merged model of the iteration before.
"""

import torch
from torch import Tensor


def add_adapters(model: torch.nn.Module, rank: int, seed: int) -> torch.nn.Module:
    """The model with adapters in all linear layers except the head; its own weights are frozen.

    rank: the rows of A. seed: that of A; the global random state stays as it is. B A is not scaled
    (ours).
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config).eval()


def merge_adapters(model: torch.nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights W + B A under the names that they have without adapters.

    weights: the state dict of the model with adapters. The model stays as it is.
    """
    merged = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    for name, layer in model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            delta = layer.get_delta_weight("default").detach()
            delta = delta.full_tensor() if hasattr(delta, "full_tensor") else delta  # if sharded
            key = f"{name}.base_layer.weight"
            merged[key] = merged[key] + delta.cpu()
    renamed = {}
    for name, weight in merged.items():
        renamed[name.removeprefix("base_model.model.").replace(".base_layer", "")] = weight
    return renamed
