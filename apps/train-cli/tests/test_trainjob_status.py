"""What a TrainJob's status server is told of a run: by a small server that does as the Trainer's documentation says."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from train_cli import trainjob_status
from train_cli.trainjob_status import refusal, status_server

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/mine/trainjobs/small/status"

pytestmark = pytest.mark.timeout(60)


@dataclass
class Server:
    """What came: paths, tokens and statuses. answers: how long it takes to answer, and the code."""

    answer_s: float = 0.0
    code: int = 200
    came: list[tuple[str, str, Any]] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """`serve()` starts a server and sets the variables that the Trainer gives to a pod of `small`."""
    started: list[ThreadingHTTPServer] = []

    def start(certificate: Path | None = None, **more: Any) -> Server:
        found = Server(**more)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"]))
                found.came.append((self.path, self.headers["Authorization"], json.loads(text)))
                time.sleep(found.answer_s)
                self.send_response(found.code)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, certificate.with_name("key.pem"))
            server.socket = context.wrap_socket(server.socket, server_side=True)
            scheme = "https"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        started.append(server)
        (tmp_path / "token").write_text("first\n", "utf-8")
        found.url = f"{scheme}://localhost:{server.server_address[1]}{PATH}"
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", found.url)
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
        if certificate is not None:
            monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate))
        return found

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def row(step: int) -> dict[str, float]:
    return {"step": step, "loss": 1.5 / step, "grad_norm": 2.0, "lr": 1e-3, "tokens_per_s": 800.0, "data_wait_s": 0.0}


def until(server: Server, count: int) -> None:
    limit = time.monotonic() + 20
    while len(server.came) < count:
        assert time.monotonic() < limit, "nothing more came"
        time.sleep(0.01)


def environ() -> dict[str, str]:
    return dict(os.environ)


def test_progress_and_time_left_go_to_the_server(serve: Any, tmp_path: Path) -> None:
    """The first and the last row, and what was the newest meanwhile, five seconds apart; the token as it is by then."""
    server = serve()
    with status_server(environ(), 40) as (read,):
        read(row(10))
        until(server, 1)
        (tmp_path / "token").write_text("second", "utf-8")
        for step in (11, 12, 13):
            time.sleep(0.01)
            read(row(step))
    assert [(path, token) for path, token, _ in server.came] == [(PATH, "Bearer first"), (PATH, "Bearer second")]
    first, last = (content["trainerStatus"] for _, _, content in server.came)
    assert first["progressPercentage"] == 25
    assert "estimatedRemainingSeconds" not in first, "one step says nothing of the pace"
    assert last["progressPercentage"] == 32
    assert last["estimatedRemainingSeconds"] >= 1
    assert isinstance(last["estimatedRemainingSeconds"], int)
    told = {one["name"]: one["value"] for one in last["metrics"]}
    assert told == {"step": "13", "loss": "0.115385", "grad_norm": "2", "lr": "0.001", "tokens_per_s": "800"}
    assert last["lastUpdatedTime"].endswith("Z")


@pytest.mark.parametrize("how", ["away", "no address", "slow", "refuses", "no token"])
def test_a_server_that_fails_is_no_matter(serve: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any, how: str) -> None:
    monkeypatch.setattr(trainjob_status, "LAST_S", 0.5 if how == "slow" else 3.0)
    server = serve(answer_s=5.0 if how == "slow" else 0.0, code=500 if how == "refuses" else 200)
    if how == "away":
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://localhost:1/status")
    if how == "no address":
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://[::1")
    if how == "no token":
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", "/nowhere/token")
    begun = time.monotonic()
    with status_server(environ(), 2) as (read,):
        read(row(1))
        if how in ("slow", "refuses"):
            until(server, 1)
        read(row(2))
    assert time.monotonic() - begun < 4, "it did not wait for the answer"
    assert capfd.readouterr() == ("", "")
    assert bool(server.came) == (how in ("slow", "refuses"))


@pytest.mark.parametrize("host", ["trainer.example:8080", "10.0.0.7", "[fd00::7]:80"])
def test_the_token_does_not_pass_a_network_in_clear(serve: Any, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    serve()
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://{host}{PATH}")
    with status_server(environ(), 2) as readers:
        assert readers == []
    assert f"= `http://{host}{PATH}` is not https" in refusal(environ())
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://{host}{PATH}")
    assert refusal(environ()) == ""


def test_a_run_says_that_its_status_is_not_told(serve: Any, cli: Any, plan: Path, monkeypatch: Any) -> None:
    serve()
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://10.0.0.7{PATH}")
    result = cli("run", plan, changes=["parallel.dp=1", "run.steps=1"])
    assert result.code == 0, result.err
    assert "the TrainJob's status is not told: " in result.err


def test_without_a_trainjob_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    with status_server({}, 2) as readers:
        assert readers == []
        assert threading.active_count() == before


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes certificates, is not installed")
@pytest.mark.parametrize("is_known", [True, False])
def test_only_the_trainers_own_server_gets_the_token(serve: Any, tmp_path: Path, is_known: bool) -> None:
    """Its certificate must be signed as the file says that the Trainer puts into the pod."""
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem"]
    for name in ("other.pem", "own.pem"):
        subprocess.run([*made, "-out", name], cwd=tmp_path, check=True, capture_output=True)
    server = serve(tmp_path / "own.pem")
    given = {} if is_known else {"KUBEFLOW_TRAINER_SERVER_CA_CERT": str(tmp_path / "other.pem")}
    with status_server(environ() | given, 2) as (read,):
        read(row(2))
    assert len(server.came) == int(is_known)


def test_a_run_tells_its_last_step(serve: Any, cli: Any, plan: Path) -> None:
    server = serve()
    result = cli("run", plan, changes=["parallel.dp=1", "run.steps=2"])
    assert result.code == 0, result.err
    assert server.came[-1][2]["trainerStatus"]["progressPercentage"] == 100
