"""Adapters: what they learn, against full weights and closed forms; what is saved of them; where they are refused."""

import json
from dataclasses import replace

import pytest
import torch
from helpers import fit, random_examples, shared_logprobs, steps_of, tiny_model
from peft import PeftModel

import pipeline.stages
import train_gsm8k as gsm8k
from pipeline.models.language_model import LanguageModel, load_model
from pipeline.models.lora import add_adapters, merged
from pipeline.records import InputError
from pipeline.runtime import preflight

LR = 0.1


def adapted(rank, model=None):
    lm = LanguageModel(model or tiny_model(), None, 128, frozenset({1}))
    return add_adapters(lm, rank, seed=0).model


def layers(model):
    """The adapted ones, under the names that they have without adapters."""
    named = model.get_base_model().named_modules()
    return {name: layer for name, layer in named if hasattr(layer, "lora_A")}


def learn(model, **options):
    rows = [[example] for example in random_examples(prompts=6, per_prompt=1)]
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    fit(model, sgd, steps_of(rows, batch=6, micro_batch=6), logprobs=shared_logprobs, max_norm=1e9)
    return model


def gradients():
    """Those of full weights in the step that `learn` makes, by name."""
    before = tiny_model().state_dict()
    return {name: (before[name] - after) / LR for name, after in learn(tiny_model()).state_dict().items()}


def test_a_step_is_that_of_full_weights_seen_through_a():
    """B = 0 at the start, so that d loss / d B = G A^T and, after a step of SGD, W + B A = W - lr G A^T A."""
    model, full, start = adapted(rank=3), gradients(), tiny_model().state_dict()
    a = {name: layer.lora_A["default"].weight.detach().clone() for name, layer in layers(model).items()}
    found = merged(model, learn(model).state_dict())
    assert set(found) == set(start)
    assert len(a) == 2 * 7
    for name, weight in start.items():
        layer = name.removesuffix(".weight")
        step = full[name] @ a[layer].T @ a[layer] if layer in a else 0
        torch.testing.assert_close(found[name], weight - LR * step, rtol=1e-12, atol=1e-12)


def test_at_full_rank_with_an_orthogonal_a_a_step_is_that_of_full_weights():
    model, full, start = adapted(rank=16), gradients(), tiny_model().state_dict()
    square = {name: layer for name, layer in layers(model).items() if layer.in_features == 16}
    for layer in square.values():
        torch.nn.init.orthogonal_(layer.lora_A["default"].weight)
    found = merged(model, learn(model).state_dict())
    for name in square:
        expected = start[f"{name}.weight"] - LR * full[f"{name}.weight"]
        torch.testing.assert_close(found[f"{name}.weight"], expected, rtol=1e-12, atol=1e-12)
    assert len(square) == 2 * 6


# ---- runs -------------------------------------------------------------------------------------------------------

SMALL = gsm8k.Settings(
    problems=4, n=4, max_new_tokens=32, test_problems=2, test_samples=2, k=2, curve_points=1, batch=4, save_every=2,
    lora=4, lr=1e-3, iterations=2,
)  # fmt: skip
MODEL, ADAPTER = "model.safetensors", "adapter/adapter_model.safetensors"


def run(folder):
    settings = replace(SMALL, out=folder)
    gsm8k.check(settings)
    return gsm8k.experiment(settings, gsm8k.gsm8k_task(settings))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder)
    return folder


def test_log_mu_is_that_of_the_model_that_sampled(finished):
    for iteration in (1, 2):
        first, *_, last = (finished / f"iteration-{iteration}/metrics.jsonl").read_text().splitlines()
        for outcome in ("pos", "neg"):
            assert abs(json.loads(first).get(f"log_ratio_{outcome}_q95", 0)) < 1e-5
        assert json.loads(last)["ess"] < 4.0  # the weights of four sequences have moved


def test_the_model_is_whole_and_its_adapter_is_peft_s_own(finished, lm):
    """model/ against the base model of the iteration with peft's own reading and merging of model/adapter."""
    bases = SMALL.model, str(finished / "iteration-1/model")
    for base, folder in zip(bases, (finished / f"iteration-{i}/model" for i in (1, 2)), strict=True):
        found = load_model(str(folder)).model.state_dict()
        peft = PeftModel.from_pretrained(load_model(base).model, folder / "adapter")
        assert peft.peft_config["default"].base_model_name_or_path == base
        torch.testing.assert_close(found, peft.merge_and_unload().state_dict())
        before = load_model(base).model.state_dict()
        assert {name for name in found if not torch.equal(found[name], before[name])} == {
            f"{name}.weight" for name, part in lm.model.named_modules() if name.endswith("_proj")
        }
        sums = (folder / "SHA256SUMS").read_text()
        assert "  adapter/adapter_model.safetensors\n" in sums


@pytest.mark.slow
def test_a_run_that_ended_at_a_checkpoint_goes_on_to_the_same_bits(finished, tmp_path, monkeypatch):
    save, found = pipeline.stages.save_checkpoint, []

    def save_and_end(folder, done, lm, optimizer):
        save(folder, done, lm, optimizer)
        found.append({file.name for file in (folder / f"checkpoint-{done}").iterdir()})
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline.stages, "save_checkpoint", save_and_end)
    for _ in range(SMALL.iterations):  # in the middle of each, after 2 of 4 steps
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run")
    assert all("adapter_model.safetensors" in names and MODEL not in names for names in found)
    run(tmp_path / "run")
    for name in ("metrics.jsonl", f"model/{MODEL}", f"model/{ADAPTER}", "test-4.jsonl"):
        for iteration in (1, 2):
            place = f"iteration-{iteration}/{name}"
            assert (tmp_path / "run" / place).read_bytes() == (finished / place).read_bytes(), place


@pytest.mark.slow
def test_bfloat16_on_one_process(finished, tmp_path):
    """Sharded over a group of one, where the weights are held as DTensors."""
    folder = tmp_path / "run"
    gsm8k.experiment(settings := replace(SMALL, out=folder, compute="bfloat16"), gsm8k.gsm8k_task(settings))
    for base, iteration in ((SMALL.model, 1), (str(folder / "iteration-1/model"), 2)):
        found = folder / f"iteration-{iteration}/model"
        peft = PeftModel.from_pretrained(load_model(base).model, found / "adapter")
        torch.testing.assert_close(
            load_model(str(found)).model.state_dict(), peft.merge_and_unload().state_dict(), rtol=0, atol=1e-7
        )


# ---- what is refused --------------------------------------------------------------------------------------------


def test_several_processes_and_a_machine_without_peft_are_refused(monkeypatch):
    gsm8k.check(SMALL)
    with pytest.raises(InputError, match="--lora 4: is for one process, and there are 2"):
        gsm8k.check(SMALL, processes=2)
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="--lora 4: needs peft"):
        preflight.check_machine(SMALL)
    preflight.check_machine(replace(SMALL, lora=None))
