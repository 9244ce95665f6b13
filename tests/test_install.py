"""The package that `pip install .` makes: topr and conformance, with torch alone, from any directory."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
NOT_REQUIRED = [
    "hypothesis",
    "matplotlib",
    "numpy",
    "pydantic",
    "rich",
    "tqdm",
    "transformers",
    "tyro",
]


def workflow():
    """The commands of the workflow in docs/conformance.md, in words."""
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    [text] = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(text.splitlines()) == 5
    return [shlex.split(step["run"]) for step in yaml.safe_load(text)["steps"] if "run" in step]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder it was installed into, as the workflow does, from a repository of the files that it is made of."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements.txt", "topr.py"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "conformance", source / "conformance")
    git = "git init --quiet && git add . && git -c user.name=a -c user.email=b commit --quiet --message All"
    subprocess.run(git, shell=True, cwd=source, check=True)
    [[pip, install, requirement], _] = workflow()
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", site]
    what = requirement.replace("URL", f"file://{source}")
    subprocess.run([sys.executable, "-m", pip, install, *options, what], check=True)
    return site


def call(installed, cwd, *arguments, without=NOT_REQUIRED):
    """The installed script in a folder of the user's, `without` some modules; a warning is an error."""
    script = (installed / "bin" / "topr-conformance").read_text(
        encoding="utf-8"
    )  # its first line is a comment
    code = f"import sys\nsys.modules |= dict.fromkeys({without})\nsys.argv[1:] = {list(arguments)}\n{script}"
    numpy = "ignore:Failed to initialize NumPy"  # torch itself warns where there is none
    command = [sys.executable, "-W", "error", "-W", numpy, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_it_holds_topr_and_the_checker_and_requires_torch(installed):
    [folder] = installed.glob("*.dist-info")
    names = {path.name for path in installed.iterdir()} - {"__pycache__", "bin"}
    assert names == {"topr.py", "conformance", folder.name}
    pinned = [
        line
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert PathDistribution(folder).requires == [
        "torch",
        *(f'{line}; extra == "experiments"' for line in pinned),
    ]


def test_the_workflow_fails_unless_the_loss_is_the_paper_s(installed, tmp_path):
    [_, [command, name, *options]] = workflow()
    assert command == "topr-conformance"
    for variant, status in (("paper", 0), ("per_token", 1)):
        code = f"import topr\nprint(topr.__file__)\nfrom conformance.variants import {variant} as function\n"
        (tmp_path / f"my_{variant}.py").write_text(code)
        done = call(installed, tmp_path, name.replace("package.module", f"my_{variant}"), *options)
        assert (done.returncode, done.stderr) == (status, "")
        assert done.stdout.startswith(f"{installed / 'topr.py'}\n")
        assert (tmp_path / options[options.index("--out") + 1] / "report.json").exists()


def test_help_does_not_wait_for_torch(installed, tmp_path):
    done = call(installed, tmp_path, "--help", without=["torch"])
    assert (done.returncode, done.stderr, done.stdout[:23]) == (0, "", "usage: topr-conformance")


def test_a_topr_py_of_the_user_s_is_not_mistaken_for_ours_and_a_copy_is_ours(installed, tmp_path):
    (tmp_path / "topr.py").write_text(
        "def loss(logp, logmu, reward, mask):\n    return logp.sum()\n"
    )
    done, hidden = (
        call(installed, tmp_path, "topr:loss"),
        f"topr.py is hidden by {installed / 'topr.py'}",
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"conformance: topr:loss: {hidden}: give it another name\n",
    )
    (tmp_path / "topr.py").write_bytes((ROOT / "topr.py").read_bytes())  # as beside a trainer
    done = call(installed, tmp_path, "topr:topr_loss_of_tokens")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("topr:topr_loss_of_tokens: paper\n")


def test_make_tells_a_venv_of_another_python_and_no_version_is_asked_for_that_one_python_lacks(
    tmp_path,
):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("requirements.txt", ".venv/ready", ".venv/bin/python"):
        (tmp_path / name).write_text("#!/bin/sh\necho 2.7\n")
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    for asked, status in (
        ((), 0),
        ((f"PYTHON={sys.executable}",), 2),
        (("PYTHON=.venv/bin/python",), 0),
    ):
        command, environment = ["make", ".venv/ready", *asked], {"PATH": os.environ["PATH"]}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert (done.returncode, "rm -r .venv" in done.stdout) == (status, status == 2)
    assert (
        "\nsetuptools==" not in (ROOT / "constraints-gpu.txt").read_text()
    )  # 3.11 and 3.12 take different ones
