"""The job of examples/slurm.sh: Slurm's signal reaches it alone, and its end would kill the run."""

import os
import signal
import subprocess

from helpers import ROOT


def test_the_job_of_slurm_waits_for_the_run_that_it_ends(tmp_path):
    programs = tmp_path / "topr" / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={tmp_path}:$PATH\n")
    on_signal = f"sleep 0.5; touch {tmp_path}/saved; exit 3"
    wait = f"touch {tmp_path}/started; while true; do sleep 0.1; done"
    (tmp_path / "torchrun").write_text(f"#!/bin/sh\ntrap '{on_signal}' TERM\n{wait}\n")
    (tmp_path / "torchrun").chmod(0o755)
    script = ["bash", ROOT / "examples" / "slurm.sh"]
    with subprocess.Popen(script, env=os.environ | {"SCRATCH": str(tmp_path)}) as job:
        while not (tmp_path / "started").exists():
            assert job.poll() is None
        job.send_signal(signal.SIGTERM)
    assert (job.returncode, (tmp_path / "saved").exists()) == (3, True)
