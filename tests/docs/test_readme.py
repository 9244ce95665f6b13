"""README and the other pages: tables, code and commands are those of the code of today."""

import ast
import inspect
import re
import runpy
import shlex
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import make
import pytest
import torch
import tyro
from docs_helpers import FENCED_CODE, ROOT, code_blocks, list_tracked, read_page

import figures.run
import topr
import toy_bandit
from examples import track
from scripts import smoke
from scripts.make_tables import BLOCK, update_tables
from tasks.judge import Judge
from topr_conformance.__main__ import parse_arguments
from toprlib.records import InputError
from toprlib.settings import check, read_settings
from train_gsm8k import PRESETS

PAGES = [str(page.relative_to(ROOT)) for page in list_tracked("*.md")]


# ---- tables --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [name for name in PAGES if BLOCK.search(read_page(name))])
def test_tables_are_those_of_the_results(name):
    page = read_page(name)
    assert update_tables(page) == page, "run python scripts/make_tables.py"


def test_a_changed_number_in_a_table_is_made_right():
    page = read_page("README.md")
    table = BLOCK.search(page).group(0)
    changed = page.replace(table, re.sub(r"\d", "7", table))
    assert changed != page
    assert update_tables(changed) == page


def read_function_table():
    """The (name, names of arguments) of each call in the table of functions of topr.py."""
    section = read_page("docs/in_your_trainer.md").partition("## Functions of topr.py")[2]
    section = section.partition("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    calls = re.findall(r"`([\w.]+)\(([^)]*)\)`", " ".join(first_cells))
    return [(name, arguments.split(", ")) for name, arguments in calls]


@pytest.mark.parametrize(("name", "arguments"), read_function_table())
def test_functions_have_the_arguments_of_the_table(name, arguments):
    parameters = list(inspect.signature(attrgetter(name)(topr)).parameters)
    assert arguments == [parameter for parameter in parameters if parameter != "self"]


def test_the_table_names_the_main_functions():
    names = {name for name, _ in read_function_table()}
    assert {"topr_loss", "sequence_log_ratio", "train", "Batch", "token_logprobs"} <= names


# ---- the loss in four lines ----------------------------------------------------------------------
def random_batch():
    """The arguments of the loss, with rewards of both signs and padding that is not a number."""
    generator = torch.Generator().manual_seed(0)
    token_logp, token_logmu = -torch.rand(2, 50, 6, generator=generator)
    reward = torch.randn(50, generator=generator)
    length = torch.randint(1, 7, (50, 1), generator=generator)
    mask = (torch.arange(6) < length).float()
    token_logmu = token_logmu.masked_fill(mask == 0, torch.nan)
    return token_logp.requires_grad_(), token_logmu, reward, mask


@pytest.mark.parametrize("page", ["README.md", "docs/in_your_trainer.md"])
def test_the_four_lines_compute_topr_loss(page):
    first_block = code_blocks(read_page(page), "python")[0]
    four_lines = first_block.split("\n\n")[-1]
    token_logp, token_logmu, reward, mask = random_batch()
    names = {"torch": torch, "token_logp": token_logp, "token_logmu": token_logmu}
    names |= {"reward": reward, "mask": mask}
    exec(four_lines, names)
    expected = topr.topr_loss(token_logp, token_logmu, reward, mask)
    torch.testing.assert_close(names["loss"], expected)
    actual_gradient = torch.autograd.grad(names["loss"], token_logp)
    expected_gradient = torch.autograd.grad(expected, token_logp)
    torch.testing.assert_close(actual_gradient, expected_gradient)


def test_the_python_of_the_readme_computes_what_its_comments_say():
    names = {}
    for block in code_blocks(read_page("README.md"), "python"):
        exec(block, names)
    names["loss"].backward()
    weight = 2.718281828**-2
    assert names["weight"].tolist() == pytest.approx([1, weight])
    # A mean over two tokens, and over two completions.
    expected = torch.tensor([[-1 / 4, -1 / 4], [weight / 4, weight / 4]])
    torch.testing.assert_close(names["token_logp"].grad, expected)


# ---- commands ------------------------------------------------------------------------------------
INLINE_COMMAND = re.compile(r"`((?:python|torchrun|make|topr-conformance) [^`\n]+)`")
FORMER_COMMANDS = {"python reproduce.py NAME"}  # results/methods.md says that it was called so
OTHER_PROGRAMS = [".", "apptainer", "cd", "docker", "export", "git", "grep", "hf", "nvidia-smi"]
OTHER_PROGRAMS += ["pip", "pipx", "sbatch", "sudo", "uv"]
PLAIN_SCRIPTS = ["one_file.py", "scripts", "examples"]  # without options


def list_commands():
    """The commands of all pages and of the docstrings of all files.

    On a page these are the lines of blocks without a language, and what the text names as code.

    Tables from results/ are left out: a command there is of the commits that stand beside it.
    """
    commands = set()
    for name in PAGES:
        page = BLOCK.sub("", read_page(name))
        lines = "\n".join(code_blocks(page)).splitlines()
        lines += INLINE_COMMAND.findall(FENCED_CODE.sub("", page))
        commands |= {without_comment(line) for line in lines}
    for file in list_tracked("*.py", ":!tests"):
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        lines = re.findall(r"^ +(?:python|torchrun) .*", docstring, re.MULTILINE)
        lines += INLINE_COMMAND.findall(docstring)
        commands |= {without_comment(line) for line in lines}
    return sorted(commands - FORMER_COMMANDS - {""})


def without_comment(line):
    return re.split(r"\s+#", line)[0].strip()


def parse_command(command):
    """Parse a command's options as the command would.

    Raises SystemExit, InputError or AssertionError if an option, a target or a file is unknown.
    """
    words = [word for word in shlex.split(command) if word != "--help"]
    if words[0] == "make":
        parse_make(words[1:])
    elif words[0] == "topr-conformance":
        parse_arguments(words[1:])
    elif words[0] == "python":
        parse_python(words[1:], processes=1)
    elif words[0] == "torchrun":
        processes = int(words[words.index("--nproc-per-node") + 1])
        is_program = [word == "-m" or word.endswith(".py") for word in words]
        parse_python(words[is_program.index(True) :], processes)
    else:
        assert words[0] in OTHER_PROGRAMS


def parse_make(words):
    targets = re.findall(r"^([\w./-]+):", read_page("Makefile"), re.MULTILINE)
    for word in words:
        assert "=" in word or word in targets


def parse_python(words, processes):
    """words: those after `python`, a file or -m with a module first."""
    if words[0] == "-m":
        module = words[1]
        arguments = words[2:]
    else:
        assert (ROOT / words[0]).is_file()
        module = words[0].removesuffix(".py").replace("/", ".")
        arguments = words[1:]
    if module == "topr_conformance":
        parse_arguments(arguments)
    elif module == "toy_bandit":
        toy_bandit._parse(arguments)
    elif module == "figures.run":
        arguments = ["fig1" if argument == "NAME" else argument for argument in arguments]
        figures.run.check(tyro.cli(figures.run.Options, args=arguments))
    elif module == "scripts.smoke":
        tyro.cli(smoke.Options, args=arguments)
    elif module == "examples.track":
        tyro.cli(track.Options, args=arguments)
    elif module == "tiny.make":
        tyro.cli(make.Settings, args=arguments)
    else:
        parse_script(Path(*module.split(".")).with_suffix(".py"), arguments, processes)


def parse_script(file, arguments, processes):
    """A script that trains, whose options are settings; or one whose arguments are files."""
    assert (ROOT / file).is_file()
    if is_training(file):
        module = import_module(".".join(file.with_suffix("").parts))
        settings = read_settings(arguments, getattr(module, "SETTINGS", PRESETS))
        check_settings = getattr(module, "check_verifier", check)
        check_settings(settings, processes)
    else:
        assert file.parts[0] in PLAIN_SCRIPTS
        for argument in arguments:
            assert argument.isupper() or (ROOT / argument).is_file()  # DIR stands for a folder


def is_training(file):
    if str(file) in ("train_gsm8k.py", "tasks/verifier.py"):
        return True
    return re.search(r"^from train_gsm8k import .*main$", read_page(file), re.MULTILINE) is not None


@pytest.mark.parametrize("command", list_commands())
def test_documented_commands_are_understood(command):
    parse_command(command)


@pytest.mark.parametrize(
    "command",
    [
        "python train_gsm8k.py --no-such",
        "python train_gsm8k.py --batch-size 0",
        "torchrun --nproc-per-node 8 train_gsm8k.py paper --batch-size 4",
        "python -m figures.run fig0",
        "python -m examples.no_such",
        "python scripts/execute_notebooks.py no_such.ipynb",
        "python no_such.py",
        "make no-such",
        "rm FILE",
    ],
)
def test_commands_that_do_not_exist_are_not_understood(command):
    with pytest.raises((InputError, SystemExit, AssertionError)):
        parse_command(command)


# ---- what is said of other files -----------------------------------------------------------------
@pytest.mark.parametrize(
    "command",
    [
        "scripts/make_page.py page.html",
        "scripts/make_tables.py README.md",
        "scripts/execute_notebooks.py README.md",
        "scripts/execute_notebooks.py notebooks/solutions/no_such.ipynb",
        "examples/smollm2.py",
        "examples/train_with_trl.py no_such",
    ],
)
def test_programs_refuse_other_arguments_and_write_nothing(command, monkeypatch):
    def write(*_, **__):
        pytest.fail(f"{command} writes")

    file, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [file, *arguments])
    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr("toprlib.plotting.save_figure", write)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / file), run_name="__main__")
    assert stop.value.code not in (0, None)


def test_length_of_one_file_is_that_in_the_readme():
    lines = read_page("one_file.py").splitlines()
    is_import = [line.startswith(("import ", "from ")) for line in lines]
    last_import = len(lines) - 1 - is_import[::-1].index(True)
    code = [line for line in lines[last_import + 1 :] if line.strip()]
    [named] = re.findall(r"in (\d+) lines below its imports", read_page("README.md"))
    assert int(named) == len(code)


def read_grading_table():
    """The (gold, answer, outcome) of each row of the table about MATH."""
    page = read_page("docs/internals/run_details.md")
    rows = re.findall(r"^\| `([^|]+)` \| (`.*?`) \| (correct|incorrect)\b", page, re.MULTILINE)
    for gold, answers, outcome in rows:
        for answer in re.findall("`(.*?)`", answers):
            yield gold, answer, outcome


def test_grading_of_mathematics_is_as_described():
    rows = list(read_grading_table())
    assert len(rows) >= 8
    judge = Judge()
    for gold, answer, outcome in rows:
        assert judge.equal(gold, answer) == (outcome == "correct"), (gold, answer)
