"""What the launcher asks the engine's HTTP server. The standard library's client only."""

from __future__ import annotations

import http.client
import json
import re

RUNNING = re.compile(
    rb"^(?:vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs)(?:\{.*\})? (\S+)$", re.M
)
"""Lines of /metrics that count the requests in work (Prometheus text format)."""


class NotAnswering(Exception):  # noqa: N818  (it is a state to wait out, not an error to report)
    """The server did not do what was asked; the text says what it did instead."""


def request(host: str, port: int, path: str, body: object = None, *, timeout_s: float) -> bytes:
    """One request: GET, or POST of a JSON body. Returns the content of a 200 answer.

    Raises:
        NotAnswering: no connection, no answer in time, or another status.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
    except TimeoutError as exc:
        raise NotAnswering(f"{path} did not answer within {timeout_s:.0f} s") from exc
    except (OSError, http.client.HTTPException) as exc:
        raise NotAnswering(f"{path}: {type(exc).__name__}: {exc}") from exc
    finally:
        connection.close()
    if response.status != 200:
        raise NotAnswering(f"{path} answered {response.status}: {content[:300].decode(errors='replace')}")
    return content


def complete_one_token(host: str, port: int, model: str, *, timeout_s: float) -> None:
    """A one-token completion: the proof that the engine generates.

    Raises:
        NotAnswering: it did not.
    """
    body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    content = request(host, port, "/v1/completions", body, timeout_s=timeout_s)
    try:
        choices = json.loads(content)["choices"]
    except (ValueError, KeyError, TypeError) as exc:
        raise NotAnswering(f"/v1/completions answered what is no completion: {content[:300]!r}") from exc
    if not choices:
        raise NotAnswering("/v1/completions answered without a choice")


def requests_in_work(host: str, port: int, *, timeout_s: float) -> float | None:
    """How many requests run or wait, or None where the engine does not tell."""
    try:
        counts = RUNNING.findall(request(host, port, "/metrics", timeout_s=timeout_s))
    except NotAnswering:
        return None
    return sum(float(count) for count in counts) if counts else None
