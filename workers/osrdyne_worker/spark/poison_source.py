"""A batch data source over the poison inventory: `spark.read.format("osrdyne-poison").option("url", …).load()`.

It reads `/v1/poison` of the pool's leader and consumes nothing. For notebooks and jobs; workers do not use it. Options:
`url` of a daemon's API; `key`, `path`, `older_than` and `newer_than` (seconds) to select entries, `timeout` (seconds,
30). One partition: the inventory is small, and each page contains the cursor of the next one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import httpx
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from osrdyne.errors import ConfigurationError, OsrdyneError
from osrdyne.protocol.leaders import leader_to_ask

FORMAT = "osrdyne-poison"
PAGE = 100
DEATH = "worker_id string, ended_with string, said string, at timestamp, log_lines array<string>, others int"
SCHEMA = (
    "id string, key string, path string, correlation_id string, reply_to string, reason string, deliveries int, "
    f"unexplained int, finding string, deaths array<struct<{DEATH}>>, replays int, first_at timestamp, "
    "last_at timestamp, size_bytes long, headers string, content_type string, body binary"
)
"""`headers` is a JSON document, because publishers choose the types of headers; `body` holds the unchanged bytes."""
_FILTERS = ("key", "path", "older_than", "newer_than")


def register(spark: SparkSession) -> None:
    """Register the format in a session."""
    spark.dataSource.register(PoisonDataSource)


class PoisonDataSource(DataSource):
    """The format `osrdyne-poison`. Created by Spark, which sends its reader to an executor."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> PoisonReader:
        options = dict(self.options)
        if "url" not in options:
            raise ConfigurationError('The option "url" is missing: .option("url", "http://127.0.0.1:4242").')
        return PoisonReader(options, schema)


class PoisonReader(DataSourceReader):
    """Reads all pages, and returns one row for each entry, with the columns of the requested schema."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._url = options["url"].rstrip("/")
        self._timeout = float(options.get("timeout", 30))
        self._query = {name: options[name] for name in _FILTERS if name in options}
        self._columns = schema.names

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Read all entries. Raises `OsrdyneError` if no daemon answers, or with the error of the daemon."""
        after: str | None = None
        with httpx.Client(timeout=self._timeout, trust_env=False) as http:
            while True:
                page = self._page(http, after)
                for entry in page["entries"]:
                    row = _row(entry)
                    yield tuple(row[name] for name in self._columns)
                after = page["next"]
                if after is None:
                    return

    def _page(self, http: httpx.Client, after: str | None) -> Mapping[str, Any]:
        cursor = {} if after is None else {"after": after}
        query = {**self._query, **cursor, "bodies": "true", "limit": str(PAGE)}
        content = self._get(http, self._url, query)
        leader = leader_to_ask(self._url, content)
        if leader is not None:
            content = self._get(http, leader, query)
        if "entries" not in content:
            raise OsrdyneError(str(content.get("detail", f"The server at {self._url} is not an osrdyne daemon.")))
        return content

    def _get(self, http: httpx.Client, url: str, query: Mapping[str, str]) -> Mapping[str, Any]:
        try:
            content = http.get(f"{url}/v1/poison", params=query).json()
        except (httpx.HTTPError, ValueError) as error:
            raise OsrdyneError(f"No osrdyne daemon answers at {url}: {error}") from error
        return content if isinstance(content, dict) else {}


def _row(entry: Mapping[str, Any]) -> dict[str, Any]:
    def moment(seconds: float | None) -> datetime | None:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC)

    deaths = [{**death, "at": moment(death["at"])} for death in entry["deaths"]]
    body = entry["body"]
    return {
        **entry,
        "deaths": deaths,
        "first_at": moment(entry["first_at"]),
        "last_at": moment(entry["last_at"]),
        "headers": json.dumps(entry["headers"], ensure_ascii=False),
        "body": base64.b64decode(body) if entry["body_encoding"] == "base64" else body.encode(),
    }
