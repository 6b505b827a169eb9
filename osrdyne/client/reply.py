"""A reply as the caller sees it: the `Response` of the protocol, with methods that decode its body."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from osrdyne.errors import ConfigurationError, InvalidMessageError
from osrdyne.protocol.messages import ARROW_TYPE, Response
from osrdyne.protocol.retries import read_attempts
from osrdyne.protocol.statuses import Status


@dataclass(frozen=True, slots=True)
class Reply(Response):
    """One answer. `progress`: it is a progress or partial answer, and others follow."""

    @property
    def ok(self) -> bool:
        return self.status == Status.OK

    @property
    def attempts(self) -> int:
        """How often a worker tried the request; 1 if the answer does not contain it."""
        return max(1, read_attempts(self.headers))

    @property
    def text(self) -> str:
        """The body as UTF-8 text; undecodable bytes are replaced."""
        return self.body.decode("utf-8", errors="replace")

    def json(self) -> Any:
        """The body decoded as JSON; None if it is empty. Raises `InvalidMessageError` if it is not JSON."""
        if not self.body:
            return None
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise InvalidMessageError(
                f"The body of the reply is not JSON (its content type is {self.content_type or 'not given'})."
            ) from error

    def arrow(self) -> Any:
        """The body as a `pyarrow.Table`; send the request with `accept=ARROW_TYPE`.

        Raises `InvalidMessageError` if the body is not an Arrow stream, and `ConfigurationError` without pyarrow.
        """
        if self.content_type != ARROW_TYPE:
            raise InvalidMessageError(
                f"The content type of the reply is {self.content_type or 'missing'}, not Arrow: send the request with "
                "accept=ARROW_TYPE."
            )
        try:
            import pyarrow as pa
        except ImportError as error:
            raise ConfigurationError("Reading Arrow needs pyarrow: pip install 'osrdyne[spark]'.") from error
        try:
            return pa.ipc.open_stream(self.body).read_all()
        except (pa.ArrowInvalid, OSError) as error:
            raise InvalidMessageError("The body of the reply is not an Arrow stream.") from error
