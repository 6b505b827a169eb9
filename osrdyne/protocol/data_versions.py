"""The version of the data that a request needs. Source: docs/reference/protocol/requests.md, "Data versions"."""

from __future__ import annotations

from collections.abc import Mapping

from osrdyne.errors import InvalidMessageError
from osrdyne.protocol.statuses import decode_text

DATA_VERSION_HEADER = "x-data-version"
"""Of a request: the lowest version of the data that may answer it. Of a reply: the version that has answered it."""
DATA_RELOADED_HEADER = "x-data-reloaded"
"""Of a reply, `true`: the data changed while the request ran; the worker has loaded it and run the handler again."""
MAX_DATA_VERSION = 2**63 - 1
"""The largest integer of AMQP."""


def check_data_version(version: int) -> int:
    """Return the version. Raises `ValueError` if it is not a whole number from 0 to `MAX_DATA_VERSION`."""
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MAX_DATA_VERSION:
        raise ValueError(f"a data version is a whole number from 0 to {MAX_DATA_VERSION}, not {version!r}")
    return version


def required_data_version(headers: Mapping[str, object]) -> int | None:
    """The version that a request needs, given as an integer or as decimal digits; None without the header.

    Raises `InvalidMessageError` for any other value.
    """
    value = headers.get(DATA_VERSION_HEADER)
    if value is None:
        return None
    text = decode_text(value)
    # Digits only: `int` would accept spaces, signs, underscores and the digits of other scripts.
    number = int(text) if text is not None and len(text) <= 19 and text.isascii() and text.isdigit() else value
    try:
        return check_data_version(number)  # type: ignore[arg-type]
    except ValueError:
        raise InvalidMessageError(
            f"The header {DATA_VERSION_HEADER} of the request is invalid: it must be a whole number from 0 to "
            f"{MAX_DATA_VERSION}."
        ) from None
