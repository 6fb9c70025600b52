"""A reward function on a server. Each sample is sent as JSON by POST. If that fails, it is sent
again until the sample's deadline."""

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
_SHARE_OF_TIMEOUT = 0.8
"""After this share of the timeout the client gives up. It knows the cause, but the driver, which
kills its process after the timeout, does not."""
_FIRST_PAUSE_S = 0.1
_URL = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:\d{1,5})?([/?][!-~]*)?", re.ASCII)
_MAX_REPLY_BYTES = 64 * 1024
_EXCERPT_CHARS = 200
_WHAT_IS_EXPECTED = (
    'a finite number, null, or a flat object {"score": number or null, "name": number or text, ...}'
)


class RewardServerError(RuntimeError):
    """A reward server could not be reached, refused a sample, or did not reply with a score."""


class RemoteReward:
    """A reward function that asks a server. It sends its arguments as the body of a POST to `url`,
    and the reply is the score.

    If the connection fails or the status is 5xx, it tries again until 80% of `timeout_s` seconds
    have passed. Any other status except 2xx is an error at once. The token of docs/rewards.md is
    sent with each request. If the server repeats it, messages show it masked. Raises ValueError if
    the URL or the token cannot be sent.
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
        is_secure = parts.scheme == "https"
        self._class = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        self._host = parts.hostname or ""
        self._port = parts.port
        self._target = parts.path or "/"
        if parts.query:
            self._target += f"?{parts.query}"
        self._headers = {"Content-Type": "application/json"}
        # Without a token this is a character that no text has. So nothing is masked.
        self._token = token or "\0"
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def __call__(self, raw_prompt: list[dict[str, Any]] | None, **arguments: Any) -> dict[str, Any]:
        """Sends the arguments of a reward function. Returns the server's reply as a dict with the
        key `score`.

        Raises RewardServerError if the server cannot be reached or its reply is no score, and
        TimeoutError if it does not reply within the deadline.
        """
        body = json.dumps(arguments | {"raw_prompt": raw_prompt}, allow_nan=False).encode()
        deadline = time.monotonic() + self._limit_s
        pause_s = _FIRST_PAUSE_S
        while True:
            seconds_left = max(0.01, deadline - time.monotonic())
            try:
                status, reply = self._post(body, seconds_left)
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
        """Sends a request, and returns the status and the reply. At most one byte more than the
        allowed length is read."""
        connection = self._class(self._host, self._port, timeout=limit_s)
        with contextlib.closing(connection):
            connection.request("POST", self._target, body, self._headers)
            response = connection.getresponse()
            reply = response.read(_MAX_REPLY_BYTES + 1)
            # An incomplete reply is an error, because "12" could arrive as the number 1.
            if response.length and len(reply) <= _MAX_REPLY_BYTES:
                raise http.client.IncompleteRead(reply, response.length)
            return response.status, reply

    def _checked(self, status: int, reply: bytes) -> dict[str, Any]:
        """Returns the fields of a reply, with the key `score`. Raises RewardServerError if the
        status is not 2xx, or the reply is too long or no score."""
        if not 200 <= status < 300:
            raise self._error(f"answered status {status}", reply)
        if len(reply) > _MAX_REPLY_BYTES:
            raise self._error(f"replied with more than {_MAX_REPLY_BYTES} bytes", reply)
        try:
            text = self._redacted(reply.decode())
            value = json.loads(text, parse_float=_number, parse_int=_number, parse_constant=_number)
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
        """Makes the error for a problem of the server. It has the beginning of the reply."""
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
    """Returns a number of a reply. Raises ValueError for NaN and for numbers that are too large for
    float32."""
    value = float(text)
    if not abs(value) <= MAX_SCORE:  # also NaN
        raise ValueError
    return value
