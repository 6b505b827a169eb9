"""Last values in PostgreSQL, with psycopg 3."""

from __future__ import annotations

from typing import Any

from osrdyne.errors import ConfigurationError, LastValueStoreError
from osrdyne.telemetry.last_values.store import LastValueStore

try:
    import psycopg
except ModuleNotFoundError:
    raise ConfigurationError(
        "telemetry.last_values.store is postgresql, which needs psycopg: pip install 'osrdyne[postgresql]'."
    ) from None

CONNECT_TIMEOUT = 10
STATEMENT_TIMEOUT = 30
_LOCK = 0x6F73_7264_796E_65  # The advisory lock under which the tables are made: "osrdyne".
_UNDEFINED_TABLE = "42P01"


class PostgresqlStore(LastValueStore):
    """The store in a PostgreSQL database. `uri` may hold a password, so no error contains it."""

    # The order of bytes, as in SQLite: pages must not depend on the locale of the database.
    TEXT = 'TEXT COLLATE "C"'
    REAL = "DOUBLE PRECISION"

    def __init__(self, uri: str, *, pool: str, create: bool = False) -> None:
        super().__init__(pool=pool, create=create)
        self._uri = uri

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            parameters = psycopg.conninfo.conninfo_to_dict(self._uri)
        except psycopg.ProgrammingError:
            raise ConfigurationError(
                "telemetry.last_values.uri is not a URI of PostgreSQL, such as postgresql://user:password@host/database."
            ) from None
        defaults: dict[str, Any] = {
            "connect_timeout": CONNECT_TIMEOUT,
            # Otherwise a call would never end if the server disappears without closing the connection.
            "tcp_user_timeout": STATEMENT_TIMEOUT * 1000,
            "application_name": "osrdyne last-value",
            "options": f"-c statement_timeout={STATEMENT_TIMEOUT}s -c lock_timeout={STATEMENT_TIMEOUT}s",
        }
        # UTF-8 whatever the encoding of the database.
        connection = psycopg.connect(**{**defaults, **parameters, "client_encoding": "utf8"})
        try:
            if self._creates:
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
                for statement in self._tables:
                    connection.execute(statement)
                connection.commit()
        except BaseException:
            connection.close()
            raise
        return connection

    def _begin(self, cursor: psycopg.Cursor[Any], *, writes: bool) -> None:
        """psycopg begins a transaction with the first statement."""

    def _sql(self, statement: str) -> str:
        return statement.replace("?", "%s")

    def _encode(self, text: str) -> str:
        # Unlike JSON, PostgreSQL allows no NUL in a text.
        return (
            text.replace("\x01", "\x01\x01").replace("\x00", "\x01\x02") if "\x00" in text or "\x01" in text else text
        )

    def _decode(self, text: str) -> str:
        if "\x01" not in text:
            return text
        return "\x01".join(part.replace("\x01\x02", "\x00") for part in text.split("\x01\x01"))

    def _translated(self, error: Exception) -> LastValueStoreError | None:
        if not isinstance(error, psycopg.Error):
            return None
        if error.sqlstate == _UNDEFINED_TABLE:
            return LastValueStoreError(
                "PostgreSQL has no last values yet: start `osrdyne last-value` with the same configuration."
            )
        text = " ".join(str(error).split())
        password = psycopg.conninfo.conninfo_to_dict(self._uri).get("password")
        if password:
            text = text.replace(str(password), "***")
        return LastValueStoreError(
            f"PostgreSQL cannot be used for last values: {text or type(error).__name__}. Check the server, and "
            "telemetry.last_values.uri."
        )
