"""The remote reward against a real server on 127.0.0.1."""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
import time
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sigmazero.config import RemoteRewardConfig
from sigmazero.records import Prompt
from sigmazero.rewards.remote import build

PICTURES = np.random.default_rng(0).integers(0, 256, (2, 9, 7, 3), dtype=np.uint8)
PROMPTS = ["the number 4", "größer ☃"]
METADATA = [{"text": "4", "boxes": [1, {"x": 2.5}]}, {}]
TOKEN = "s3cret-token"


class Server(ThreadingHTTPServer):
    """Gives its answers in order, ``(status, body, headers)`` each; a body may come in pieces, drawn as it is sent."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, Any, dict[str, str]]] = []
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"

    def answer(self, status: int, body: Any, **headers: str) -> None:
        if not isinstance(body, (bytes, Generator)):
            body = json.dumps(body).encode()
        self.answers.append((status, body, headers))


class Handler(BaseHTTPRequestHandler):
    server: Any

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, dict(self.headers), body))
        status, pieces, headers = self.server.answers.pop(0)
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            for piece in [pieces] if isinstance(pieces, bytes) else pieces:
                self.wfile.write(piece)
                self.server.sent += len(piece)
        except OSError:
            pass  # the client has hung up, as it should

    def log_message(self, format: str, *args: Any) -> None:
        """A test's output stays clean."""


@pytest.fixture
def server() -> Generator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between tries, which take no time here."""
    asked: list[float] = []
    monkeypatch.setattr("sigmazero.rewards.remote.time.sleep", asked.append)
    return asked


def score(url: str, **settings: Any) -> Any:
    reward = build(RemoteRewardConfig(kind="remote", url=url, **settings), [])
    return reward(PICTURES, PROMPTS, METADATA)


def refusal(url: str, **settings: Any) -> str:
    with pytest.raises(ValueError, match=r"^rewards: kind remote") as caught:
        score(url, **settings)
    assert "\n" not in str(caught.value)
    assert url in str(caught.value)
    return str(caught.value)


def test_pictures_prompts_and_metadata_arrive_and_scores_come_back(server: Server) -> None:
    server.answer(200, {"scores": [0.25, -3]})
    reward = build(RemoteRewardConfig(kind="remote", url=server.url), [])
    assert (reward.layout, reward.size) == ("hwc_uint8", None)
    reward.check(Prompt(0, ""))
    assert reward(PICTURES, PROMPTS, METADATA) == [0.25, -3]
    [(path, headers, body)] = server.requests
    sent = json.loads(body)
    assert (path, headers["Content-Type"]) == ("/score", "application/json")
    assert "Authorization" not in headers
    assert sent.keys() == {"pictures", "prompts", "metadata"}
    assert (sent["prompts"], sent["metadata"]) == (PROMPTS, METADATA)
    for encoded, picture in zip(sent["pictures"], PICTURES, strict=True):
        opened = Image.open(io.BytesIO(base64.b64decode(encoded, validate=True)))
        assert opened.format == "PNG"
        np.testing.assert_array_equal(np.asarray(opened), picture)


@pytest.mark.parametrize(
    "scores", [[None, 1.0], [None, None], {"style": [1, 2], "layout": [None, 0.5]}]
)  # fmt: skip
def test_nulls_and_names_are_passed_on(server: Server, scores: Any) -> None:
    server.answer(200, {"scores": scores, "model": "other keys are ignored"})
    assert score(server.url) == scores


def test_failures_that_may_pass_are_tried_again(server: Server, waits: list[float]) -> None:
    for _ in range(2):
        server.answer(503, b"starting")
    server.answer(200, {"scores": [1, 2]})
    assert score(server.url, retries=2) == [1, 2]
    assert waits == [0.5, 1.0]
    assert len({body for _, _, body in server.requests}) == 1


def test_tries_end(server: Server) -> None:
    for _ in range(2):
        server.answer(503, b"still\nstarting")
    text = refusal(server.url, retries=1)
    assert "failed 2 times, at last: it answered 503 'still starting'" in text
    assert len(server.requests) == 2


def test_too_many_requests_are_tried_again(server: Server) -> None:
    server.answer(429, b"")
    server.answer(200, {"scores": [1, 2]})
    assert score(server.url, retries=1) == [1, 2]


def test_no_connection_is_tried_again_with_growing_waits(waits: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert "failed 8 times, at last: ConnectError" in refusal(f"http://127.0.0.1:{port}/", retries=7)
    assert waits == [0.5, 1, 2, 4, 8, 8, 8]


def test_an_answer_that_does_not_come_in_time_is_tried_again(server: Server) -> None:
    late = threading.Event()

    def silence() -> Generator[bytes]:
        late.wait(5)
        yield b"{}"

    server.answer(200, silence())
    server.answer(200, {"scores": [1, 2]})
    assert score(server.url, retries=1, try_limit=1) == [1, 2]
    late.set()


def test_an_answer_that_trickles_ends_at_the_try_limit(server: Server) -> None:
    pause = threading.Event()

    def trickle() -> Generator[bytes]:
        for _ in range(200):
            pause.wait(0.02)
            yield b" "

    server.answer(200, trickle())
    start = time.monotonic()
    assert "not complete after 0.5 s" in refusal(server.url, retries=0, try_limit=0.5)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("status", [400, 404, 422])
def test_other_refusals_are_not_tried_again(server: Server, status: int) -> None:
    server.answer(status, b"no such route" + b"!" * 5000)
    text = refusal(server.url, retries=3)
    assert f"it answered {status} 'no such route!" in text
    assert len(text) < 400
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(server: Server, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setenv("SCORER_TOKEN", TOKEN)
    server.answer(status, b"", Location=server.url)
    assert "redirects are not followed" in refusal(server.url, token_variable="SCORER_TOKEN", retries=3)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"scores": [1]}, "the answer has 1 scores for 2 pictures; it answered '{\"scores\": [1]}'"),
        ({"scores": [1, 2, 3]}, "3 scores for 2 pictures"),
        ({"scores": {"a": [1, 2], "b": [1]}}, "1 scores for 2 pictures"),
        ({"scores": {"a": 1}}, "no list of scores for 2 pictures"),
        ({"scores": {}}, "is no object"),
        ({"scores": 1}, "is no object"),
        ({"score": [1, 2]}, "is no object"),
        ([1, 2], "is no object"),
        ({"scores": ["1", 2]}, "neither number nor null"),
        ({"scores": [True, 2]}, "neither number nor null"),
        (b"<html>\n hello", "the answer is no JSON; it answered '<html> hello'"),
        (b"\xff\xfe", "the answer is no JSON"),
        (b"", "the answer is no JSON"),
        (b"[" * 200_000, "the answer is no JSON"),
    ],
)  # fmt: skip
def test_an_answer_of_another_form_is_refused_and_shown(server: Server, answer: Any, said: str) -> None:
    server.answer(200, answer)
    text = refusal(server.url)
    assert said in text
    assert len(text) < 500
    assert len(server.requests) == 1


def test_a_huge_answer_is_left_unread(server: Server) -> None:
    server.answer(200, (b"[" * 2**20 for _ in range(200)))
    assert "longer than 16777216 bytes" in refusal(server.url)
    server.shutdown()
    server.server_close()  # waits for the answering thread
    assert server.sent < 100 * 2**20


def test_a_token_goes_into_the_header_and_nowhere_else(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setenv("SCORER_TOKEN", TOKEN)
    reward = build(RemoteRewardConfig(kind="remote", url=server.url, token_variable="SCORER_TOKEN"), [])
    server.answer(200, {"scores": [1, 2]})
    reward(PICTURES, PROMPTS, METADATA)
    assert server.requests[0][1]["Authorization"] == f"Bearer {TOKEN}"
    server.answer(401, f"Bearer {TOKEN} is unknown".encode())
    with pytest.raises(ValueError, match="401") as caught:
        reward(PICTURES, PROMPTS, METADATA)
    said = "".join(capfd.readouterr())
    for text in (str(caught.value), repr(reward), said, caplog.text):
        assert TOKEN not in text


def test_a_token_that_is_not_set_or_no_header_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RemoteRewardConfig(kind="remote", url="http://127.0.0.1/", token_variable="SCORER_TOKEN")
    monkeypatch.delenv("SCORER_TOKEN", raising=False)
    with pytest.raises(ValueError, match="token_variable 'SCORER_TOKEN', but that environment variable is not set"):
        build(config, [])
    monkeypatch.setenv("SCORER_TOKEN", f"{TOKEN}\n")
    with pytest.raises(ValueError, match="line ends") as caught:
        build(config, [])
    assert TOKEN not in str(caught.value)


def test_an_address_that_is_none_or_holds_a_password_is_refused() -> None:
    with pytest.raises(ValueError, match="no address"):
        build(RemoteRewardConfig(kind="remote", url="http://[::1"), [])
    with pytest.raises(ValueError, match="user or password") as caught:
        build(RemoteRewardConfig(kind="remote", url="https://me:hidden@scorer.example/"), [])
    assert "hidden" not in str(caught.value)
