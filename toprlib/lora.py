"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft: a layer's weight is W + B A, of which A and B are trained.

A is random and B zero at the start of each iteration, so that pi = mu there: log mu is that of the model that sampled,
which is the base model in the first iteration and the merged one of the iteration before in the others.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel


def add_adapters(model: PreTrainedModel, rank: int, seed: int) -> torch.nn.Module:
    """The model with adapters in all linear layers but the head. They alone are trained; the weights are frozen.

    rank: the rows of A. seed: that of A; the global random state is left as it was. B A is not scaled (ours).
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config).eval()


def merged(model: torch.nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights W + B A under the names that they have without adapters. weights: those of the model with adapters.

    The model and its frozen weights stay as they are.
    """
    whole = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    for name, layer in model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            delta = layer.get_delta_weight("default").detach()
            delta = (
                delta.full_tensor() if hasattr(delta, "full_tensor") else delta
            )  # of a sharded model
            whole[f"{name}.base_layer.weight"] = whole[f"{name}.base_layer.weight"] + delta.cpu()
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): whole[name]
        for name in whole
    }
