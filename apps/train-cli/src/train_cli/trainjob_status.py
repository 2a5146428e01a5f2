"""Posts the progress of a TrainJob to the status server of the Kubeflow Trainer, for its `status.trainerStatus`.

    rows of steps ──> the newest status ──> a thread ──> POST, every five seconds at most

The Trainer (2.2 or later, feature gate `TrainJobStatus`) puts three variables into each pod: where to post, and files with its
certificate and a token, which is sent over TLS, or within this machine. Whatever fails here is silent: training neither waits
for the server nor ends with it.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from train_cli.progress import Pace

if TYPE_CHECKING:
    from http.client import HTTPConnection

URL, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
"""Variables of a pod: the address, and the paths of the certificate that signs for it and of the token, which changes."""

INTERVAL_S = 5.0
"""Between two posts, as the Trainer asks for."""

ANSWER_S = 5.0
LAST_S = 3.0
"""For the answer to a post; and for the last one, after which the run ends."""

SHOWN = ("loss", "held_out_loss", "grad_norm", "lr", "tokens_per_s", "samples_per_s")
"""Of a row of metrics, what the status tells too, beside the step."""

Row = Mapping[str, float]


def refusal(environ: Mapping[str, str]) -> str:
    """Returns why nothing is posted to the server: the token would pass the network unencrypted; "" if it would not."""
    url = environ.get(URL)
    if not url or not environ.get(TOKEN) or _is_guarded(url):
        return ""
    return f"the TrainJob's status is not told: {URL} = `{url}` is not https, and whoever listens would read the token"


def _is_guarded(url: str) -> bool:
    """Returns whether what is sent to `url` is encrypted, or stays on this machine."""
    try:
        to = urlsplit(url)
        host = to.hostname or ""
        return to.scheme == "https" or host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return url.startswith("https:")  # an address that cannot be read is told nothing anyway


@contextmanager
def status_server(environ: Mapping[str, str], num_steps: int) -> Iterator[list[Callable[[Row], None]]]:
    """Yields readers of the rows of a run of `num_steps` that post its progress: one in a TrainJob, else none.

    Nothing is posted either if `refusal` gives a reason. At the end the last row is posted, for which the block waits LAST_S at
    most.
    """
    if not environ.get(URL) or not environ.get(TOKEN) or refusal(environ):
        yield []
        return
    certificate = environ.get(CERTIFICATE)
    post = _Post(environ[URL], Path(environ[TOKEN]), Path(certificate) if certificate else None)
    status = _Status(num_steps, post)
    try:
        yield [status.read]
    finally:
        status.close()


class _Post:
    """Posts JSON to `url`, with the token that is in the file at that moment."""

    def __init__(self, url: str, token: Path, certificate: Path | None) -> None:
        self._url = url
        self._token = token
        self._certificate = certificate

    def __call__(self, content: Any) -> None:
        """Posts `content`. Raises whatever URLs, files, TLS and HTTP raise; the server's answer is ignored."""
        to = urlsplit(self._url)
        headers = {"Authorization": f"Bearer {self._token.read_text('utf-8').strip()}", "Content-Type": "application/json"}
        # Not urllib's opener, which takes the token along where a proxy or a redirection leads.
        connection = self._connection(to)
        try:
            connection.request("POST", to.path, json.dumps(content), headers)
            connection.getresponse().read()
        finally:
            connection.close()

    def _connection(self, to: SplitResult) -> HTTPConnection:
        """Returns a connection to the host of the URL; over TLS with the given certificate for https."""
        # Imported in a TrainJob alone.
        import ssl
        from http.client import HTTPConnection, HTTPSConnection

        host = to.hostname or ""
        if to.scheme != "https":
            return HTTPConnection(host, to.port, timeout=ANSWER_S)
        context = ssl.create_default_context(cafile=self._certificate)
        return HTTPSConnection(host, to.port, timeout=ANSWER_S, context=context)


class _Status:
    """Keeps the newest status, and runs a thread that posts it."""

    def __init__(self, num_steps: int, post: Callable[[Any], None]) -> None:
        self._num_steps = num_steps
        self._post = post
        self._pace = Pace(num_steps)
        self._newest: dict[str, Any] | None = None
        self._metrics: dict[str, str] = {}
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="sley-trainjob-status", daemon=True)
        self._thread.start()

    def read(self, row: Row) -> None:
        """Takes the row of a step. Does not wait."""
        step = int(row["step"])
        self._pace.saw(step)
        left_s = self._pace.left_s(step)
        self._metrics["step"] = str(step)
        self._metrics |= {name: f"{row[name]:.6g}" for name in SHOWN if name in row}
        status: dict[str, Any] = {
            "progressPercentage": 100 * step // self._num_steps,
            "metrics": [{"name": name, "value": value} for name, value in self._metrics.items()],
            "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        }
        if left_s is not None:
            status["estimatedRemainingSeconds"] = math.ceil(left_s)
        with self._changed:
            self._newest = status
            self._changed.notify()

    def close(self) -> None:
        """Posts what is new and ends the thread; after LAST_S the thread is left to end with the process."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(LAST_S)

    def _run(self) -> None:
        """Runs in the thread: posts each new status, at most once per interval; failures are ignored."""
        while (status := self._next()) is not None:
            with suppress(Exception):  # it is away, or does not want it: training is none of its business
                self._post({"trainerStatus": status})
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, INTERVAL_S)

    def _next(self) -> dict[str, Any] | None:
        """Waits for a status that was not posted and returns it; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self._is_closing)
            newest, self._newest = self._newest, None
            return newest
