"""Models of the hub: one that refuses, is out of reach, or stops in the middle of a download."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants
from run_helpers import ROOT, SMALL, command_line, input_error, run_small

COMMIT = "0" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with the model owner/model, and owner/licensed, whose licence nobody has accepted.

    If `stops_after` is a number, it sends so many bytes of the weights, and then nothing.
    """

    protocol_version = "HTTP/1.1"
    folder = Path(SMALL.model)
    stops_after: int | None = None
    released = threading.Event()

    def do_GET(self):
        if "owner/licensed" in self.path:
            self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif self.path.startswith("/api/"):
            self.answer(200, json.dumps(self.description()).encode())
        else:
            self.send_file()

    do_HEAD = do_GET

    def description(self):
        names = [file.name for file in self.folder.iterdir()]
        if "/tree/" in self.path:
            return [{"type": "file", "path": name, "size": 0, "oid": "0"} for name in names]
        files = [{"rfilename": name} for name in names]
        return {"id": "owner/model", "sha": COMMIT, "siblings": files}

    def send_file(self):
        file = self.folder / self.path.split("?")[0].rpartition("/")[2]
        content = file.read_bytes() if file.exists() else b""
        headers = {"ETag": f'"{file.name}"', "X-Repo-Commit": COMMIT}
        stops = file.suffix == ".safetensors" and self.stops_after is not None
        sent = self.stops_after if stops else len(content)
        self.answer(200 if file.exists() else 404, content, headers, sent)
        if stops and self.command == "GET":
            Hub.stops_after = 0
            self.released.wait()

    def answer(self, status, content, headers=None, sent=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:sent])

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture(scope="module")
def hub():
    """The address of a hub on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("is_offline", "command"), [(False, "hf auth login"), (True, "hf download owner/licensed")]
)
def test_hub_that_refuses_or_is_out_of_reach(hub, tmp_path, monkeypatch, is_offline, command):
    monkeypatch.setenv("NO_PROXY", "*")
    template = f"{hub}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    values = {
        "ENDPOINT": hub,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": is_offline,
    }
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)  # the library has read its environment already
    error = input_error(run_small, tmp_path / "run", model="owner/licensed")
    assert (error.option, error.file) == ("--model", "owner/licensed")
    assert command in str(error)  # which command helps differs
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_interrupted_download_is_resumed_by_the_same_command(hub, tmp_path):
    arguments = command_line(tmp_path / "run", model="owner/model", iterations=0)
    command = [sys.executable, "train_gsm8k.py", *arguments]
    variables = os.environ | {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path),
        "NO_PROXY": "*",
        "HF_HUB_DOWNLOAD_TIMEOUT": "1",
    }
    Hub.stops_after = 1000
    first = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    Hub.released.set()
    assert first.returncode == 1
    assert "--model: owner/model: " in first.stderr.splitlines()[-1]
    assert not (tmp_path / "run" / "iteration-1").exists()
    Hub.stops_after = None
    subprocess.run(command, cwd=ROOT, env=variables, check=True)
    assert (tmp_path / "run" / "results.json").exists()
