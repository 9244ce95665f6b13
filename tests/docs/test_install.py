"""pip installs topr.py from the root, and the checker from conformance/; both need torch alone."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution

import pytest
from helpers import ROOT

ROOT_FILES = ("pyproject.toml", "README.md", "LICENSE", "topr.py")
LOSS = """import topr
def wrong(token_logp, token_logmu, reward, mask): return -(reward * token_logp.sum(1)).mean()
def right(token_logp, token_logmu, reward, mask): return topr.topr_loss(
    token_logp, token_logmu, reward, mask)
"""


@pytest.mark.slow
def test_the_installed_checker_judges_a_loss_with_the_installed_topr(tmp_path):
    sources = tmp_path / "topr"
    shutil.copytree(ROOT / "conformance", sources / "conformance")
    for name in ROOT_FILES:
        shutil.copy(ROOT / name, sources)
    options = "--quiet --no-deps --no-index --no-build-isolation --target".split()
    pip = [sys.executable, "-m", "pip", "install", *options, tmp_path / "installed"]
    subprocess.run([*pip, sources, sources / "conformance"], check=True)
    for metadata in (tmp_path / "installed").glob("*.dist-info"):
        assert set(PathDistribution(metadata).requires) == {"torch", "numpy"}
    assert (tmp_path / "installed/topr_conformance/py.typed").exists()
    (tmp_path / "losses.py").write_text(LOSS)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    for name, status in (("right", 0), ("wrong", 1)):
        check = [sys.executable, "-m", "topr_conformance", f"losses:{name}"]
        done = subprocess.run(check, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (status, "")
