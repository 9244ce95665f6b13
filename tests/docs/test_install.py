"""What pip installs: topr.py from the root, the checker from conformance/; what make installs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution

import pytest
import yaml
from docs_helpers import ROOT, code_blocks, read_page

# Packages of the experiments, which an installed checker must not import.
NOT_REQUIRED = [
    "hypothesis",
    "matplotlib",
    "pydantic",
    "rich",
    "tqdm",
    "transformers",
    "tyro",
]


def read_workflow():
    """The commands of the job in docs/conformance.md, each as words."""
    [job] = code_blocks(read_page("docs/conformance.md"), "yaml")
    steps = yaml.safe_load(job)["steps"]
    return [shlex.split(step["run"]) for step in steps if "run" in step]


# ---- installation --------------------------------------------------------------------------------
def install(requirement, folder):
    """Install without a network: torch and numpy, which are required, are there already."""
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", folder]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, requirement], check=True)


def installed(folder):
    """The files and packages that were installed into a folder, and their metadata."""
    [metadata] = folder.glob("*.dist-info")
    others = {"__pycache__", "bin", metadata.name}
    names = {path.name for path in folder.iterdir()} - others
    return names, PathDistribution(metadata)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A git repository of the files that the two distributions are made from."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements.txt", "topr.py"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT / "conformance", folder / "conformance", ignore=ignored)
    author = ["-c", "user.name=author", "-c", "user.email=author"]
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    commit = ["git", *author, "commit", "--quiet", "--message", "All files"]
    subprocess.run(commit, cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def checker(repository, tmp_path_factory):
    """The folder that the checker is installed into, by the command of the documented job."""
    folder = tmp_path_factory.mktemp("checker")
    pip, install_word, requirement = read_workflow()[0]
    assert (pip, install_word) == ("pip", "install")
    install(requirement.replace("URL", f"file://{repository}"), folder)
    return folder


def test_the_root_installs_topr_alone(repository, tmp_path):
    install(repository, tmp_path)
    names, distribution = installed(tmp_path)
    assert names == {"topr.py"}
    optional = [line for line in distribution.requires if "extra ==" in line]
    assert set(distribution.requires) - set(optional) == {"torch", "numpy"}


def test_the_checker_is_a_distribution_of_its_own(checker):
    names, distribution = installed(checker)
    assert names == {"topr_conformance"}
    assert distribution.requires == ["torch", "numpy"]
    assert distribution.metadata["Name"] == "topr-conformance"
    source = ROOT / "conformance" / "topr_conformance"
    expected = {path.name for path in source.glob("*.py")}
    assert {path.name for path in (checker / "topr_conformance").glob("*.py")} == expected


# ---- the installed checker -----------------------------------------------------------------------
def run_checker(checker, folder, *arguments):
    """Run the installed script in a user's folder, with what it requires; a warning is an error."""
    script = (checker / "bin" / "topr-conformance").read_text(encoding="utf-8")
    lines = [
        "import sys",
        f"sys.modules |= dict.fromkeys({NOT_REQUIRED})",  # None: importing it fails
        f"sys.argv[1:] = {list(arguments)}",
        script,
    ]
    command = [sys.executable, "-W", "error", "-c", "\n".join(lines)]
    environment = os.environ | {"PYTHONPATH": str(checker)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("variant", "status"), [("paper", 0), ("per_token", 1)])
def test_the_documented_job_fails_unless_the_loss_is_the_papers(checker, tmp_path, variant, status):
    program, name, *options = read_workflow()[1]
    assert program == "topr-conformance"
    code = f"from topr_conformance.variants import {variant} as function\n"
    (tmp_path / "my_loss.py").write_text(code)
    (tmp_path / "topr.py").write_text("raise ImportError('the checker needs no topr.py')\n")
    done = run_checker(checker, tmp_path, name.replace("package.module", "my_loss"), *options)
    assert (done.returncode, done.stderr) == (status, "")
    out = options[options.index("--out") + 1]
    assert (tmp_path / out / "report.json").exists()


def test_a_users_file_may_have_any_name(checker, tmp_path):
    """Nothing that the checker imports from its own package hides the file."""
    code = "def loss(logp, logmu, reward, mask):\n    return -(reward * logp.sum(1)).mean()\n"
    for name in ("topr", "conformance", "losses", "variants", "vectors"):
        (tmp_path / f"{name}.py").write_text(code)
        done = run_checker(checker, tmp_path, f"{name}:loss")
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.startswith(f"{name}:loss: ")


# ---- make ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argument", "status"),
    [
        ("PYTHON=.venv/bin/python", 0),
        (f"PYTHON={sys.executable}", 2),
        ("ARGS=", 0),  # PYTHON is the Makefile's own
    ],
)
def test_make_refuses_a_venv_of_another_python(tmp_path, argument, status):
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 2.7\n")
    python.chmod(0o755)
    (tmp_path / "conformance").mkdir()
    for name in ("requirements.txt", "conformance/pyproject.toml", ".venv/ready"):
        (tmp_path / name).touch()
    environment = {"PATH": os.environ["PATH"]}
    command = ["make", ".venv/ready", argument]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == status


CLOSED_INDEX = "http://127.0.0.1:9/simple"


def write_program(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("variables", "asks_uv"),
    [
        ({"PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": CLOSED_INDEX}, True),
        ({"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": CLOSED_INDEX}, False),
        ({"PIP_CONFIG_FILE": "pip.conf"}, False),
    ],
    ids=["no index", "PIP_INDEX_URL", "pip.conf"],
)
def test_packages_come_from_the_index_of_pips_settings(tmp_path, variables, asks_uv):
    """uv does not read pip's settings, so it must not be asked."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    programs = tmp_path / ".venv" / "bin"
    write_program(programs / "pip", f'exec {sys.executable} -m pip "$@"')
    write_program(programs / "uv", 'echo "$@" >> uv.log')
    (tmp_path / "conformance").mkdir()
    for name in ("requirements.txt", "conformance/pyproject.toml", ".venv/ready"):
        (tmp_path / name).touch()
    (tmp_path / "requirements-dev.txt").write_text("no-such-package==1\n")
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {CLOSED_INDEX}\n")
    environment = {"PATH": os.environ["PATH"], "PIP_RETRIES": "0", **variables}
    command = ["make", ".venv/dev-ready"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert (tmp_path / "uv.log").exists() == asks_uv
    assert (done.returncode == 0) == asks_uv
    assert (tmp_path / ".venv" / "dev-ready").exists() == asks_uv


def test_the_real_model_may_lie_in_a_folder_whose_name_has_a_space(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pip", "python"):  # a line for each argument
        write_program(tmp_path / ".venv" / "bin" / name, 'printf "%s\\n" "$@" >> log')
    (tmp_path / "conformance").mkdir()
    for name in ("requirements.txt", "conformance/pyproject.toml", ".venv/ready"):
        (tmp_path / name).touch()
    (tmp_path / "a").mkdir()  # a careless `rm -r` would remove it
    (tmp_path / "a model.package").mkdir()
    command = ["make", "real-llm", f"REAL_LLM_DIR={tmp_path}/a model"]
    subprocess.run(command, cwd=tmp_path, env={"PATH": os.environ["PATH"]}, check=True)
    arguments = (tmp_path / "log").read_text().splitlines()
    assert arguments.count(f"{tmp_path}/a model") == 2  # of the program that makes it, and the run
    assert f"{tmp_path}/a model.package" in arguments
    assert (tmp_path / "a").exists()
    assert not (tmp_path / "a model.package").exists()


def test_constraints_hold_for_each_python():
    """Python 3.11 and 3.12 need different versions of setuptools."""
    pinned = re.findall(r"^([\w.-]+)==", read_page("constraints-gpu.txt"), re.MULTILINE)
    assert pinned
    assert "setuptools" not in pinned
