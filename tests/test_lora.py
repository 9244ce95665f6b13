"""Adapters: what they learn, against full weights and closed forms; what is saved of them; where they are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import fit, random_examples, steps_of, tiny_model
from killing import finish, started, wait
from peft import PeftModel
from pipeline.models.language_model import load_model
from pipeline.models.lora import add_adapters, merged
from pipeline.records import InputError
from runs import SMALL, contents

import train_gsm8k as gsm8k


def learnt(model):
    """The model's weights after a step of SGD."""
    rows = [[example] for example in random_examples(prompts=6, per_prompt=1)]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, sgd, steps_of(rows, batch=6, micro_batch=6), max_norm=1e9)
    return model.state_dict()


@pytest.mark.parametrize("rank", [3, 16])
def test_a_step_is_that_of_full_weights_seen_through_a(rank):
    """B = 0 at the start, so that d loss / d B = G A^T and, after a step of SGD, W + B A = W - lr G A^T A.

    At full rank with an orthogonal A, that is the step of full weights.
    """
    model = add_adapters(tiny_model(), rank, seed=0)
    named = model.get_base_model().named_modules()
    a = {
        f"{name}.weight": layer.lora_A["default"].weight
        for name, layer in named
        if hasattr(layer, "lora_A")
    }
    square = {name for name, weight in a.items() if weight.shape[1] == rank}
    for name in square:
        torch.nn.init.orthogonal_(a[name])
    assert (len(a), len(square)) == (2 * 7, 2 * 6 if rank == 16 else 0)
    a = {name: weight.detach().clone() for name, weight in a.items()}
    start, full, found = (
        tiny_model().state_dict(),
        learnt(tiny_model()),
        merged(model, learnt(model)),
    )
    assert set(found) == set(start)
    for name, weight in start.items():
        step = full[name] - weight
        seen = (
            step if name in square else step @ a[name].T @ a[name] if name in a else torch.zeros(())
        )
        torch.testing.assert_close(found[name], weight + seen, rtol=1e-12, atol=1e-12)


CHANGES = {
    "lora": 4,
    "lr": 1e-3,
    "iterations": 2,
    "problems": 4,
    "batch": 4,
    "save_every": 2,
    "curve_points": 1,
}


@pytest.mark.parametrize("compute", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_model_is_whole_and_its_adapter_is_peft_s_own(run, compute):
    """model/ against the base model of the iteration with peft's own reading and merging of model/adapter.

    bfloat16 is sharded over a group of one, where the weights are held as DTensors.
    """
    finished, base = run(compute=compute, **CHANGES), SMALL.model
    for folder in (finished / f"iteration-{i}" / "model" for i in (1, 2)):
        before, found = (
            load_model(base).model.state_dict(),
            load_model(str(folder)).model.state_dict(),
        )
        peft = PeftModel.from_pretrained(load_model(base).model, folder / "adapter")
        assert peft.peft_config["default"].base_model_name_or_path == base
        torch.testing.assert_close(
            found, peft.merge_and_unload().state_dict(), rtol=1e-6, atol=1e-7
        )
        changed = {name for name in found if not torch.equal(found[name], before[name])}
        assert changed == {name for name in found if name.endswith("_proj.weight")}
        assert "  adapter/adapter_model.safetensors\n" in (folder / "SHA256SUMS").read_text()
        base = str(folder)


@pytest.mark.slow
def test_a_run_killed_after_a_checkpoint_goes_on_to_the_same_bits(run, tmp_path):
    checkpoint = tmp_path / "run" / "iteration-2" / "checkpoint-2"
    with started(tmp_path / "run", usual=CHANGES) as process:
        wait(process, checkpoint.exists)
    adapters = torch.load(checkpoint / "rank-0.pt", weights_only=True)["weights"]
    assert {min(weight.shape) for weight in adapters} == {4}  # and no weight of the model
    found, expected = finish(tmp_path / "run", usual=CHANGES), contents(run(**CHANGES))
    differing = {
        Path(name).name for name in {*found, *expected} if found.get(name) != expected.get(name)
    }
    # peft's config has a set, in any order, and the path of the base model, as its README has.
    assert differing <= {"adapter_config.json", "README.md", "SHA256SUMS"}


def test_several_processes_are_refused():
    with pytest.raises(InputError, match="--lora 4: is for one process, and there are 2"):
        gsm8k.check(replace(SMALL, lora=4), processes=2)


def test_peft_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("pipeline.settings.find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"--lora 4: needs peft, which is not installed: .* -m pip install peft"
    ):
        gsm8k.check(replace(SMALL, lora=4))
