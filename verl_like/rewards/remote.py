"""A reward function on a server: each sample is sent as JSON by POST, again if that fails, until
the sample's deadline."""

import contextlib
import http.client
import json
import os
import re
import time
from typing import Any
from urllib.parse import urlsplit

from verl_like.rewards.registry import MAX_SCORE

TOKEN_VARIABLE = "VERL_LIKE_REWARD_TOKEN"
# The client gives up before its process is killed, because the client knows the cause.
_SHARE_OF_TIMEOUT = 0.8
_FIRST_PAUSE_S = 0.1
_URL = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:\d{1,5})?([/?][!-~]*)?", re.ASCII)
_MAX_REPLY_BYTES = 64 * 1024
_EXCERPT_CHARS = 200
_WHAT_IS_EXPECTED = (
    'a finite number, null, or a flat object {"score": number or null, "name": number or text, ...}'
)


class RewardServerError(RuntimeError):
    """A reward server could not be reached, refused a sample or replied with no score."""


class RemoteReward:
    """A reward function that asks a server. Its arguments are the body of a POST to `url`, and the
    reply is the score.

    After a failed connection or a status of 5xx it tries again, until 80% of `timeout_s` seconds
    have passed. Any other status but 2xx is an error at once. The token of docs/rewards.md is sent
    with each request, and masked in messages if the server repeats it. Raises ValueError if the URL
    or the token cannot be sent.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        if not _URL.fullmatch(url):
            raise ValueError(
                f"custom_reward_function.path={re.sub('//.*@', '//', url)!r} is not the URL of a "
                "server: give http://host:port/path or https://..., and a token in "
                f"{TOKEN_VARIABLE}, not in the URL"
            )
        parts = urlsplit(url)
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not all("!" <= char <= "~" for char in token):
            raise ValueError(
                f"{TOKEN_VARIABLE} has white space or characters beyond ASCII: set it to the token "
                "alone"
            )
        self._url = url
        self._limit_s = _SHARE_OF_TIMEOUT * timeout_s
        self._class = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._host = parts.hostname or ""
        self._port = parts.port
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._headers = {"Content-Type": "application/json"}
        # Without a token this is a character that no text has, so that nothing is masked.
        self._token = token or "\0"
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def __call__(self, raw_prompt: list[dict[str, Any]] | None, **arguments: Any) -> dict[str, Any]:
        """Sends the arguments of a reward function and returns the server's reply, as a dict with
        the key `score`.

        Raises RewardServerError if the server cannot be reached or its reply is no score, and
        TimeoutError if it does not reply within the deadline.
        """
        body = json.dumps(arguments | {"raw_prompt": raw_prompt}, allow_nan=False).encode()
        deadline = time.monotonic() + self._limit_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                status, reply = self._post(body, max(0.01, deadline - time.monotonic()))
            except TimeoutError:
                raise TimeoutError(
                    f"{self._url} gave no answer within {self._limit_s:g} s"
                ) from None
            except (OSError, http.client.HTTPException) as error:
                problem = self._error(f"cannot be reached ({type(error).__name__}: {error})")
            else:
                if status < 500:
                    return self._checked(status, reply)
                problem = self._error(f"answered status {status}", reply)
            if time.monotonic() + pause_s >= deadline:
                raise problem
            time.sleep(pause_s)
            pause_s *= 2

    def _post(self, body: bytes, limit_s: float) -> tuple[int, bytes]:
        """Sends a request. Returns the status and the reply, of which at most one byte more than is
        allowed is read."""
        with contextlib.closing(self._class(self._host, self._port, timeout=limit_s)) as connection:
            connection.request("POST", self._target, body, self._headers)
            response = connection.getresponse()
            reply = response.read(_MAX_REPLY_BYTES + 1)
            # A reply that is cut short is an error: "12" would become the number 1.
            if response.length and len(reply) <= _MAX_REPLY_BYTES:
                raise http.client.IncompleteRead(reply, response.length)
            return response.status, reply

    def _checked(self, status: int, reply: bytes) -> dict[str, Any]:
        """The fields of a reply, `score` among them. Raises RewardServerError for a status other
        than 2xx, and for a reply that is too long or no score."""
        if not 200 <= status < 300:
            raise self._error(f"answered status {status}", reply)
        if len(reply) > _MAX_REPLY_BYTES:
            raise self._error(f"replied with more than {_MAX_REPLY_BYTES} bytes", reply)
        try:
            value = json.loads(
                self._redacted(reply.decode()),
                parse_float=_number,
                parse_int=_number,
                parse_constant=_number,
            )
            # This raises ValueError for half a surrogate pair, which cannot be written to a file.
            json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            value = []
        fields = value if isinstance(value, dict) else {"score": value}
        is_flat = all(
            field is None or isinstance(field, str | float | bool) for field in fields.values()
        )
        if not is_flat or isinstance(fields.get("score", ""), str):
            raise self._error(f"did not reply with {_WHAT_IS_EXPECTED}", reply)
        return fields

    def _error(self, problem: str, reply: bytes | None = None) -> RewardServerError:
        """Makes the error for a problem of the server, with the beginning of its reply."""
        excerpt = ""
        if reply:
            start = self._redacted(reply.decode(errors="replace"))[:_EXCERPT_CHARS]
            excerpt = f": {start!r}"
        return RewardServerError(
            f"{self._url} {self._redacted(problem)}{excerpt}; correct the "
            f"server, custom_reward_function.path, or the token in {TOKEN_VARIABLE}"
        )

    def _redacted(self, text: str) -> str:
        return text.replace(self._token, "[token]")


def _number(text: str) -> float:
    """A number of a reply. Raises ValueError for NaN and for what is too large for float32."""
    value = float(text)
    if not abs(value) <= MAX_SCORE:  # also NaN
        raise ValueError
    return value
