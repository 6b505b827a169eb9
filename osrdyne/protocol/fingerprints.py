"""The fingerprint of a request: how a worker's report and the evidence in the poison inventory name the same request.

It is made of what no hop changes. It reveals nothing of the content, and it is no proof: two
requests that are alike in all of these are one to it.
"""

from __future__ import annotations

from hashlib import blake2b

HASHED_BODY_BYTES = 4096
"""Only the beginning of a body counts, and its length, so that a fingerprint costs microseconds for every body."""
REQUESTS_FIELD = "requests"
"""The field of an activity report that holds the fingerprints of the requests that run."""
SUSPECTS_FIELD = "suspects"
"""How many requests a worker has put aside because an earlier worker may have died of them."""
ALONE_FIELD = "alone"
"""The text fingerprint of the one of them that runs now, with nothing else in the worker."""
STUCK_FIELD = "stuck"
"""The text fingerprint of a request whose handler did not end when it was cancelled: the worker ends because of it."""
MAX_NAMED_REQUESTS = 64
"""How many a report names."""


def fingerprint(
    *, key: str, path: str, correlation_id: str | None, reply_to: str | None, message_id: str | None, body: bytes
) -> str:
    """16 hexadecimal digits."""
    digest = blake2b(digest_size=8)
    for part in (key, path, correlation_id, reply_to, message_id):
        raw = b"-" if part is None else b"+" + part.encode("utf-8", "surrogateescape")
        digest.update(b"%d:" % len(raw) + raw)
    digest.update(b"%d:" % len(body) + body[:HASHED_BODY_BYTES])
    return digest.hexdigest()


def text_fingerprint(path: str, body: bytes) -> str:
    """16 hexadecimal digits of what a request asks for, whatever its caller: its path and its whole body."""
    raw = path.encode("utf-8", "surrogateescape")
    return blake2b(b"%d:" % len(raw) + raw + body, digest_size=8).hexdigest()


def named_requests(details: object) -> tuple[str, ...]:
    """The fingerprints in a report's field, whatever else may be there."""
    if not isinstance(details, list):
        return ()
    return tuple(one for one in details[:MAX_NAMED_REQUESTS] if isinstance(one, str) and len(one) <= 64)
