"""A scorer behind HTTP.

It gets ``POST {"pictures": [base64 of a PNG, ...], "prompts": [text, ...], "metadata": [object, ...]}`` and answers
``{"scores": [number or null, ...]}``, or ``{"scores": {"name": [number or null, ...], ...}}``; null: no score.
"""

from __future__ import annotations

import base64
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from PIL import Image

from sigmazero.config import RemoteRewardConfig
from sigmazero.records import Prompt
from sigmazero.rewards.base import Layout, Reward, Values

_MAX_BYTES = 16 * 2**20  # of an answer
_WAIT, _LONGEST_WAIT = 0.5, 8.0  # seconds before the first further try, doubled each time up to the longest
_TRANSIENT = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)


class _TryAgain(Exception):
    """A failure that may pass."""


@dataclass
class RemoteReward:
    """Asks one address, a new connection a call; calls may overlap."""

    url: str
    retries: int
    try_limit: float
    token: str = field(repr=False)  # "": none
    layout: Layout = "hwc_uint8"
    size: tuple[int, int] | None = None

    def check(self, prompt: Prompt) -> None:
        """The scorer decides; its null is a sample's failure."""

    def __call__(self, pictures: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Values:
        """
        Raises:
            ValueError: every try failed, or the answer is none that was asked for.
        """
        answer = self._answer(request_body(pictures, prompts, metadata))
        try:
            return scores_of(answer, len(prompts))
        except ValueError as error:
            raise ValueError(self._line(f"{error}; it answered {self._short(answer)}")) from None

    def _answer(self, body: bytes) -> bytes:
        failure = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(_WAIT * 2 ** (attempt - 1), _LONGEST_WAIT))
            try:
                return self._ask(body)
            except _TryAgain as error:
                failure = str(error)
        raise ValueError(self._line(f"failed {self.retries + 1} times, at last: {failure}; see that it runs"))

    def _ask(self, body: bytes) -> bytes:
        """One request and its answer.

        Raises:
            _TryAgain: no connection, no answer in time, 429 or 5xx.
            ValueError: any other failure.
        """
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # a small answer stays small
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        limit = time.monotonic() + self.try_limit
        try:
            # Neither redirects nor netrc and proxy variables: the token goes to this address only.
            with (
                httpx.Client(timeout=self.try_limit, trust_env=False, follow_redirects=False) as client,
                client.stream("POST", self.url, content=body, headers=headers) as response,
            ):
                self._check_status(response)
                return self._read(response, limit)
        except _TRANSIENT as error:
            raise _TryAgain(f"{type(error).__name__} {error}".strip()) from None
        except httpx.HTTPError as error:
            raise ValueError(self._line(f"{type(error).__name__} {error}".strip())) from None

    def _check_status(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        said = f"it answered {response.status_code} {self._short(next(response.iter_raw(), b''))}"
        if response.status_code == 429 or response.status_code >= 500:
            raise _TryAgain(said)
        if response.is_redirect:
            said += "; redirects are not followed, set url to the final address"
        raise ValueError(self._line(said))

    def _read(self, response: httpx.Response, limit: float) -> bytes:
        """The whole answer; httpx limits the time of each piece only."""
        read = bytearray()
        for piece in response.iter_raw():
            read += piece
            if len(read) > _MAX_BYTES:
                raise ValueError(self._line(f"its answer is longer than {_MAX_BYTES} bytes: {self._short(read)}"))
            if time.monotonic() > limit:
                raise _TryAgain(f"its answer was not complete after {self.try_limit:g} s")
        return bytes(read)

    def _short(self, answer: bytes | bytearray) -> str:
        """The start of an answer for an error, without the token should a server echo it."""
        text = answer[:4096].decode("utf-8", "replace")
        text = " ".join((text.replace(self.token, "[token]") if self.token else text).split())
        return repr(text if len(text) <= 200 else text[:200] + "...")

    def _line(self, what: str) -> str:
        return f"rewards: kind remote, url {self.url}: {what}"


def request_body(pictures: Any, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> bytes:
    """The JSON of a request, of uint8 pictures ``[b, H, W, 3]``."""
    encoded = [base64.b64encode(_png(picture)).decode("ascii") for picture in pictures]
    content = {"pictures": encoded, "prompts": list(prompts), "metadata": [dict(entry) for entry in metadata]}
    return json.dumps(content).encode("utf-8")


def _png(picture: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG")
    return file.getvalue()


def scores_of(answer: bytes, count: int) -> Values:
    """The ``count`` scores of an answer, or lists of them by name.

    Raises:
        ValueError: it is no JSON object with ``scores``, or they are not ``count`` numbers or nulls.
    """
    try:
        content = json.loads(answer)
    except (ValueError, RecursionError):
        raise ValueError("the answer is no JSON") from None
    scores = content.get("scores") if isinstance(content, dict) else None
    if not isinstance(scores, (list, dict)) or scores == {}:
        raise ValueError('the answer is no object {"scores": [...]} or {"scores": {"name": [...]}}')
    for values in scores.values() if isinstance(scores, dict) else [scores]:
        if not isinstance(values, list) or len(values) != count:
            given = len(values) if isinstance(values, list) else "no list of"
            raise ValueError(f"the answer has {given} scores for {count} pictures")
        if not all(value is None or type(value) in (int, float) for value in values):
            raise ValueError("the answer has scores that are neither number nor null")
    return scores


def build(config: RemoteRewardConfig, plugins: Sequence[str]) -> Reward:
    """The reward of a recipe; nothing is asked yet.

    Raises:
        ValueError: ``url`` is none or holds a password, or the token's variable is not set.
    """
    try:
        url = httpx.URL(config.url)
    except httpx.InvalidURL as error:
        raise ValueError(f"rewards: kind remote has url {config.url!r}, which is no address: {error}") from None
    if url.userinfo:
        raise ValueError(
            f"rewards: kind remote has a url with a user or password, for {url.host}; recipes are saved as they are, "
            "so name an environment variable with a token by token_variable"
        )
    token = _token(config.token_variable) if config.token_variable else ""
    return RemoteReward(config.url, config.retries, config.try_limit, token)


def _token(variable: str) -> str:
    token = os.environ.get(variable, "")
    if not token:
        raise ValueError(
            f"rewards: kind remote has token_variable {variable!r}, but that environment variable is not set; set it, "
            "or leave token_variable out"
        )
    # httpx quotes a header that it refuses, so such a token must not get that far.
    if not all("!" <= letter <= "~" for letter in token):
        raise ValueError(
            f"rewards: kind remote has token_variable {variable!r}, whose value holds blanks, line ends or letters "
            "outside ASCII; set it to the bare token"
        )
    return token
