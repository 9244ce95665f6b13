"""The command topr-conformance: its exit status, what it prints and writes, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import topr
from topr_conformance import VECTORS
from topr_conformance import __main__ as command

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "internals" / "run_details.md").read_text(encoding="utf-8")
FIELDS = dict(re.findall(r"(?m)^\| `(\S+)` \| (string|integer|list|string or null) \| ", PAGE))
TYPES = {"string": str, "integer": int, "list": list, "string or null": str | None}

OWN_LOSSES = """\
from topr_conformance import variants


def odd(logp, logmu, reward, mask):
    return variants.paper(logp, logmu, reward * (1 + (logp.shape == (4, 7))), mask)


def each(logp, logmu, reward, length):
    return -reward * logp / length


def each_token(logp, logmu, reward, mask):
    return -reward[:, None] * logp


def detached(logp, logmu, reward, mask):
    return variants.paper(logp.detach(), logmu, reward, mask)
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the command in a folder with a file of losses; returns its exit status, or its error."""
    (tmp_path / "my_losses.py").write_text(OWN_LOSSES, encoding="utf-8")
    (tmp_path / "my_broken_file.py").write_text("def loss(:\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["topr-conformance", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            command.main()
        return ended.value.code

    yield run
    sys.modules.pop("my_losses", None)


@pytest.mark.parametrize(
    ("loss", "num_random", "variant", "adapter"),
    [
        ("topr_conformance.variants:paper", 200, "paper", "none"),
        ("topr_conformance.variants:tempered", 20, "tempered", "none"),
        ("my_losses:each", 0, "naive reinforce", "sequences + mean over completions"),
        ("./my_losses.py:odd", 200, "paper", "none"),
    ],
)
def test_the_command_prints_and_writes_its_report(run, capsys, loss, num_random, variant, adapter):
    run(loss, "--random", num_random, "--out", "report", "--verbose")
    report = json.loads(Path("report/report.json").read_text(encoding="utf-8"))
    expected = {"loss": loss, "random": num_random, "variant": variant, "adapter": adapter}
    assert {name: report[name] for name in expected} == expected
    printed = capsys.readouterr().out
    assert printed.startswith(f"{loss}: {variant}")
    assert (adapter in printed) == (adapter != "none")
    for text in (report["note"], report["difference"] or "", *report["changes"]):
        assert text in printed
    for vector in report["vectors"]:
        assert vector["asks"] in printed
        assert f"{vector['measured']}\n" in printed


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["topr_conformance.variants:paper"], 0),
        (["topr_conformance.variants:paper", "--random", 200], 0),
        (["topr_conformance.variants:per_token"], 1),
        (["my_losses:each"], 1),
        (["./my_losses.py:odd"], 0),
        (["./my_losses.py:odd", "--random", 200], 1),
    ],
)
def test_the_exit_status_is_0_for_the_paper_s_loss_only(run, arguments, status):
    assert run(*arguments) == status


def test_the_fields_of_the_report_are_those_of_the_page(run):
    run("topr_conformance.variants:tempered", "--random", 20, "--out", "report")
    report = json.loads(Path("report/report.json").read_text(encoding="utf-8"))
    assert [vector["name"] for vector in report["vectors"]] == list(VECTORS)
    for vector in report["vectors"]:
        fields = dict(report)
        for name, value in vector.items():
            fields[f"vectors[].{name}"] = value
        assert fields.keys() == FIELDS.keys()
        for name, value in fields.items():
            assert isinstance(value, TYPES[FIELDS[name]])


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ([], "--list"),
        (["topr_conformance"], "topr_conformance"),
        (["topr_conformance:nothing"], "nothing"),
        (["my_broken_file:loss"], "SyntaxError"),
        (["here/nothing.py:loss"], "here/nothing.py"),
        (["my_losses:detached"], "logp"),
        (["my_losses:odd", "--out", "my_broken_file.py"], "my_broken_file.py"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_a_line(run, arguments, culprit):
    message = run("--out", "report", *arguments)
    assert culprit in message
    assert "\n" not in message
    assert not Path("report").exists()


def test_a_file_with_the_name_of_an_imported_module_is_refused(run):
    for name, function in (("json", "dumps"), ("sys", "exit")):  # sys has no file of its own
        Path(f"{name}.py").write_text(f"def {function}(logp, logmu, reward, mask): ...\n")
        assert f"{name}.py" in run(f"{name}.py:{function}")


def test_a_copy_of_an_imported_module_is_taken_for_it(run):
    """As a copy of topr.py next to a trainer is."""
    Path("topr.py").write_bytes(Path(topr.__file__).read_bytes())
    assert run("topr.py:topr_loss") == 0


def test_the_number_of_random_batches_is_not_negative(run):
    assert run("topr_conformance.variants:paper", "--random", -1) == 2


def test_without_options_the_verdict_and_the_arguments_are_printed(run, capsys):
    assert run("topr_conformance.example:loss") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "topr_conformance.example:loss: paper"
    assert len(lines) == 2
    for name in ("token_logp", "token_logmu", "reward", "mask"):
        assert name in lines[1]
    assert not Path("report.json").exists()


def test_each_mean_that_was_taken_is_printed(run, capsys):
    run("my_losses:each")
    of_completions = capsys.readouterr().out
    run("my_losses:each_token")
    of_tokens = capsys.readouterr().out
    assert command.MEANS["mean over completions"] in of_completions
    assert command.MEANS["tokens"] not in of_completions
    assert command.MEANS["tokens"] in of_tokens


@pytest.mark.parametrize("count", [-1, 10**9, "many"])
def test_a_number_of_batches_without_sense_is_refused(run, count):
    assert run("topr_conformance.variants:paper", "--random", count) == 2


def list_vectors(**options):
    """Start `python -m topr_conformance --list` in a process of its own."""
    words = [sys.executable, "-m", "topr_conformance", "--list"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "conformance")}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, **options)


def test_list_prints_the_vectors(tmp_path):
    with list_vectors(cwd=tmp_path, text=True) as process:
        assert process.communicate() == ("\n\n".join(VECTORS.values()) + "\n", "")
        assert process.returncode == 0


def test_a_reader_may_close_the_pipe_of_the_list(tmp_path):
    with list_vectors(cwd=tmp_path) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
