"""What pip installs: from the root topr.py, from conformance/ the checker; both need torch only."""

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


def install(requirement, folder):
    """Install without its dependencies and without a network, as only torch is required."""
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", folder]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, requirement], check=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository of the files that the two distributions are made of."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements.txt", "topr.py"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT / "conformance", source / "conformance", ignore=ignored)
    author = ["-c", "user.name=a", "-c", "user.email=b"]
    subprocess.run(["git", "init", "--quiet"], cwd=source, check=True)
    subprocess.run(["git", "add", "."], cwd=source, check=True)
    commit = ["git", *author, "commit", "--quiet", "--message", "All"]
    subprocess.run(commit, cwd=source, check=True)
    return source


@pytest.fixture(scope="module")
def checker(repository, tmp_path_factory):
    """The folder that the checker was installed into, as the workflow does."""
    site = tmp_path_factory.mktemp("checker")
    [[_, command, requirement], _] = workflow()
    assert command == "install"
    install(requirement.replace("URL", f"file://{repository}"), site)
    return site


def call(site, cwd, *arguments):
    """The installed script in a folder of the user's, with torch alone; a warning is an error."""
    script = (site / "bin" / "topr-conformance").read_text(encoding="utf-8")
    hide = f"import sys\nsys.modules |= dict.fromkeys({NOT_REQUIRED})"
    code = f"{hide}\nsys.argv[1:] = {list(arguments)}\n{script}"
    numpy = "ignore:Failed to initialize NumPy"  # torch itself warns without it
    command = [sys.executable, "-W", "error", "-W", numpy, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def contents(site):
    [folder] = site.glob("*.dist-info")
    names = {path.name for path in site.iterdir()} - {"__pycache__", "bin", folder.name}
    return names, PathDistribution(folder)


def test_the_root_installs_topr_alone(repository, tmp_path):
    install(repository, tmp_path)
    names, distribution = contents(tmp_path)
    assert names == {"topr.py"}
    assert "torch" in distribution.requires
    extra = [line for line in distribution.requires if line != "torch"]
    assert all("extra ==" in line for line in extra)


def test_the_checker_is_a_distribution_of_its_own(checker):
    names, distribution = contents(checker)
    assert names == {"topr_conformance"}
    assert distribution.requires == ["torch"]
    assert distribution.metadata["Name"] == "topr-conformance"
    files = {path.name for path in (checker / "topr_conformance").glob("*.py")}
    assert files == {path.name for path in (ROOT / "conformance" / "topr_conformance").glob("*.py")}


@pytest.mark.parametrize(("variant", "status"), [("paper", 0), ("per_token", 1)])
def test_the_workflow_fails_unless_the_loss_is_the_paper_s(checker, tmp_path, variant, status):
    [_, [command, name, *options]] = workflow()
    assert command == "topr-conformance"
    code = f"from topr_conformance.variants import {variant} as function\n"
    (tmp_path / "my_loss.py").write_text(code)
    (tmp_path / "topr.py").write_text("raise ImportError('the checker needs no topr.py')\n")
    done = call(checker, tmp_path, name.replace("package.module", "my_loss"), *options)
    assert (done.returncode, done.stderr) == (status, "")
    out = options[options.index("--out") + 1]
    assert (tmp_path / out / "report.json").exists()


def test_a_file_of_the_user_s_may_have_any_name(checker, tmp_path):
    """Nothing that the checker imports from its own package hides it."""
    code = "def loss(logp, logmu, reward, mask):\n    return -(reward * logp.sum(1)).mean()\n"
    for name in ("topr", "conformance", "losses", "variants", "vectors"):
        (tmp_path / f"{name}.py").write_text(code)
        done = call(checker, tmp_path, f"{name}:loss")
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.startswith(f"{name}:loss: ")


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
