"""The command topr-conformance: its exit status, what it prints and writes, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest

from topr_conformance import __main__ as command
from topr_conformance.vectors import TEXT, VECTORS

OWN_LOSSES = """\
from dataclasses import dataclass
from helper import paper

@dataclass
class Half:
    factor: "float" = 0.5

def half(logp, logmu, reward, mask):
    return Half().factor * paper(logp, logmu, reward, mask)

def with_a_proportion(logp, logmu, reward, mask):
    return paper(logp, logmu, reward * (1 - 0.4 * (reward < 0)), mask), {"metrics": {}}

def odd(logp, logmu, reward, mask):
    return paper(logp, logmu, reward * (1 + (mask.shape == (4, 7) and reward[0] > 1)), mask)
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the command in a folder with a file of losses; returns its exit status, or its error."""
    (tmp_path / "json.py").write_text(OWN_LOSSES)  # the name of a module that is imported already
    (tmp_path / "helper.py").write_text("from topr_conformance import paper\n")
    (tmp_path / "broken.py").write_text("def loss(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["topr-conformance", *words])
        with pytest.raises(SystemExit) as ended:
            command.main()
        return ended.value.code

    yield run
    sys.modules.pop("helper", None)


def test_the_paper_s_loss_in_a_file(run, capsys):
    assert run("json.py:half", "--out", "report") == 0
    assert capsys.readouterr().out.splitlines()[0] == "json.py:half: paper"
    report = json.loads(Path("report/report.json").read_text())
    assert (report["loss"], report["variant"], report["changes"]) == ("json.py:half", "paper", [])
    assert [vector["name"] for vector in report["vectors"]] == list(VECTORS)


def test_a_proportion_is_named_and_passes(run, capsys):
    """A factor of 0.6 on negatives: (1 - p) / p with p = 62.5 %."""
    assert run("json.py:with_a_proportion") == 0
    assert "62.5 %" in capsys.readouterr().out


def test_the_seed_chooses_random_batches(run, capsys):
    """A loss that is wrong for some batches of four completions of seven tokens only."""
    assert {run("json.py:odd", "--seed", seed) for seed in "56"} == {0, 1}
    assert "Eq. 7" in capsys.readouterr().out


def test_another_loss_in_a_module(run, capsys):
    assert run("public_losses:trinity", "--verbose") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "public_losses:trinity: per-token + token mean"
    assert [line.split(":")[1] for line in lines[1:3]] == [" per-token", " token mean"]
    assert "token_logmu = logmu" in lines[3]
    assert len(lines[4:]) == 3 * len(VECTORS)


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["topr_conformance"], "topr_conformance"),
        (["topr_conformance:VARIANTS"], "callable"),
        (["broken.py:loss"], "SyntaxError"),
        (["json.py:lost"], "lost"),
        (["here/nothing.py:loss"], "here/nothing.py"),
        (["json.py:half", "--out", "broken.py"], "broken.py"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_a_line(run, arguments, culprit):
    message = run("--out", "report", *arguments)
    assert culprit in message
    assert "\n" not in message
    assert not Path("report").exists()


def test_the_list_has_every_vector_and_no_loss_is_an_error(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["topr-conformance", "--list"])
    command.main()
    assert capsys.readouterr().out == TEXT + "\n"
    assert run() == 2
