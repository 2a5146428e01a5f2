"""Files of a dataset on a hub: downloaded once on a host, then read without a server."""

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from sley_data.documents import read_documents
from sley_data.files import find_document_files, matches_pattern
from sley_data.plugin import TextConfig

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {name: json.dumps({"text": name}).encode() for name in ("data/a-0.jsonl", "data/a-1.jsonl", "data/old/a-2.jsonl")}


class _Hub(BaseHTTPRequestHandler):
    """Answers as the hub does about one dataset. requests: the paths that were asked for."""

    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        name = self.path.split(f"/resolve/{SHA}/")[-1]
        if name in FILES:
            content, code = FILES[name], 200
        elif self.path.startswith(("/api/datasets/org/name/revision/v1", "/api/datasets/org/name")):
            files = [{"rfilename": each} for each in FILES]
            content, code = json.dumps({"id": "org/name", "sha": SHA, "siblings": files}).encode(), 200
        else:
            content, code = b"{}", 404
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", hashlib.sha256(content).hexdigest())
        self.send_header("X-Repo-Commit", SHA)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    _Hub.requests = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A function that returns the texts of hub files, or the problems of their names. port: the port of the hub."""

    def read_texts(port: int, *names: str, is_offline: bool = False) -> str:
        url = f"http://127.0.0.1:{port}"
        settings = {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"}
        for name, value in {**settings, "HF_HUB_CACHE": str(tmp_path / "hf"), "HF_HUB_OFFLINE": is_offline}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        table = {"files": names, "field": "text", "sequence": 4, "held_out": 0.0}
        config = TextConfig.model_validate(table, context={"folder": Path("/plan")})
        files, problems = find_document_files(config, "train")
        return str(problems or [text.decode() for _, text in read_documents(files, config, "train")])

    return read_texts


def test_files_are_downloaded_once(read: Callable[..., str], server: ThreadingHTTPServer) -> None:
    name, port = "hf://datasets/org/name/data/*.jsonl", server.server_port
    assert read(port, name) == "['data/a-0.jsonl', 'data/a-1.jsonl']"
    num_requests = len(_Hub.requests)
    assert not any("old" in path for path in _Hub.requests)
    assert "data/old/a-2.jsonl" in read(port, name, "hf://datasets/org/name@v1/**/*.jsonl")
    assert not any(path.endswith("/datasets/org/name") for path in _Hub.requests[num_requests:]), "known without a server"


def test_missing_files_are_named(read: Callable[..., str], server: ThreadingHTTPServer) -> None:
    messages = {
        "hf://datasets/org/name/data/*.parquet": "matches `data/*.parquet`",
        "hf://datasets/org/none/data/*.parquet": "`org/none` cannot be downloaded: ",
        "hf://org/name": "must have the form hf://",
    }
    output = read(server.server_port, *messages)
    for number, message in enumerate(messages.values()):
        assert message in output
        assert f"('data', 'files', {number})" in output
    assert output.count("code='data-hub'") == 3


def test_without_a_network_or_the_package_it_is_said(read: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "hf://datasets/org/name/data/*.jsonl"
    assert "`org/name` cannot be downloaded: " in read(9, name, is_offline=True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "sley-data[hub]" in read(9, name)


def test_a_name_stays_as_it_is_in_a_plan() -> None:
    table = TextConfig.model_validate(
        {"files": ["hf://datasets/org/name/*.txt"], "sequence": 4}, context={"folder": Path("/plan")}
    )
    (again,) = table.model_dump(context={"folder": Path("/plan")})["files"]
    assert TextConfig.model_validate({"files": [again], "sequence": 4}, context={"folder": Path("/other")}).files == table.files


@pytest.mark.parametrize(
    ("path", "pattern", "is_match"),
    [
        ("a/b.txt", "a/*.txt", True),
        ("a/b/c.txt", "a/*.txt", False),
        ("a/b/c.txt", "**/*.txt", True),
        ("c.txt", "**/*.txt", True),
        ("a/b/c.txt", "a/**", True),
        ("a/b/c.txt", "b/**", False),
        ("a", "a/b", False),
    ],
)
def test_patterns_match_by_folders(path: str, pattern: str, *, is_match: bool) -> None:
    assert matches_pattern(path.split("/"), pattern.split("/")) == is_match
