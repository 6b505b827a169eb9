"""What a Spark program may expect of the data source `rabbitmq-stream`, on any RabbitMQ that is supported."""

import asyncio
import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from filled_streams import SMALL_SEGMENTS, fill, numbered, padded
from pyspark.errors import PySparkException

from osrdyne.amqp.streams import StreamRange
from osrdyne_sources.rabbit_stream import RabbitStream
from osrdyne_sources.rabbit_stream.broker import BlockingBroker
from osrdyne_sources.rabbit_stream.options import parse_options
from tests.integration.broker_api import close_connections

pytestmark = pytest.mark.usefixtures("java")


class Source:
    """The source with its options, and a RabbitMQ to fill."""

    def __init__(self, spark: Any, uri: str, uri_file: Path, pool: str) -> None:
        self.spark, self.uri, self.uri_file, self.pool = spark, uri, uri_file, pool

    def fill(self, name: str, messages: Any, **options: Any) -> str:
        stream = f"{self.pool}-{name}"
        asyncio.run(fill(self.uri, stream, messages, **options))
        return stream

    def options(self, **options: Any) -> dict[str, Any]:
        return {"uriFile": str(self.uri_file), "timeout": 120, **options}

    def batch(self, **options: Any) -> Any:
        return self.spark.read.format("rabbitmq-stream").options(**self.options(**options)).load()

    def run(self, directory: Path, **options: Any) -> list[int]:
        """Run a query until it has everything that is there now; return the rows of its batches."""
        frame = self.spark.readStream.format("rabbitmq-stream").options(**self.options(**options)).load()
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(directory / "checkpoint"))
        query = writer.trigger(availableNow=True).start(str(directory / "table"))
        assert query.awaitTermination(300)
        return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]

    def stored(self, directory: Path) -> list[tuple[str, int]]:
        table = self.spark.read.parquet(str(directory / "table"))
        return sorted((row.stream, int(row.body)) for row in table.collect())


@pytest.fixture(scope="module", autouse=True)
def registered(spark):
    spark.dataSource.register(RabbitStream)


@pytest.fixture
def source(spark, broker, pool_id, tmp_path):
    uri_file = tmp_path / "uri"
    uri_file.write_text(broker.amqp_uri + "\n")
    return Source(spark, broker.amqp_uri, uri_file, pool_id)


def test_a_batch_reads_ranges_in_splits(source):
    first = source.fill("a", numbered(250))
    second = source.fill("b", numbered(40))
    third = source.fill("empty", [])
    frame = source.batch(
        streams=json.dumps([first, second, third]),
        startingOffsets=json.dumps({first: 100}),
        endingOffsets=json.dumps({first: 230}),
        maxOffsetsPerPartition=50,
    )
    assert frame.rdd.getNumPartitions() == 4
    rows = frame.collect()
    assert Counter(row.stream for row in rows) == {first: 130, second: 40}
    assert sorted(row.offset for row in rows if row.stream == first) == list(range(100, 230))
    assert sorted(int(row.body) for row in rows if row.stream == second) == list(range(40))


@pytest.mark.nightly
def test_a_query_continues_where_its_checkpoint_ends(source, tmp_path):
    """Every message once: with a limit for each batch, two streams, and a restart."""
    first = source.fill("a", numbered(120))
    second = source.fill("b", numbered(30))
    options = {"streams": json.dumps([first, second]), "maxOffsetsPerTrigger": 60}
    batches = source.run(tmp_path, **options)
    assert (sum(batches), max(batches)) == (150, 60)
    source.fill("b", numbered(10, first=30))
    assert source.run(tmp_path, **options) == [10]
    assert source.run(tmp_path, **options) == []
    expected = [(first, number) for number in range(120)] + [(second, number) for number in range(40)]
    assert source.stored(tmp_path) == sorted(expected)


@pytest.mark.nightly
def test_a_query_whose_messages_are_gone_fails_or_goes_on(source, tmp_path):
    stream = source.fill("log", padded(2), arguments=SMALL_SEGMENTS)
    assert source.run(tmp_path, stream=stream) == [2]
    source.fill("log", padded(200), arguments=SMALL_SEGMENTS)
    with pytest.raises(PySparkException, match=r"The offsets 2 to \d+ of the stream .* are no longer in it"):
        source.run(tmp_path, stream=stream)
    assert 0 < sum(source.run(tmp_path, stream=stream, failOnDataLoss="false")) < 200


@pytest.mark.nightly
def test_the_program_of_the_documentation_runs(source, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "read-rabbitmq-streams.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    stream = source.fill("log", numbered(3))
    program = found[1]
    for documented, own in (
        ("/run/secrets/rabbitmq-uri", str(source.uri_file)),
        ('"events"', f'"{stream}"'),
        ("/data/", f"{tmp_path}/"),
    ):
        assert documented in program
        program = program.replace(documented, own)
    exec(compile(program, "read-rabbitmq-streams.md", "exec", dont_inherit=True), {})
    rows = source.spark.read.parquet(str(tmp_path / "events")).collect()
    assert sorted((row.offset, row.device) for row in rows) == [(number, stream) for number in range(3)]
    assert sorted(row.event for row in rows) == ["0", "1", "2"]


def test_credentials_are_in_no_plan_log_or_error(source, capfd, caplog):
    stream = source.fill("log", numbered(1))
    password = urlsplit(source.uri).password
    assert password
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, logger="py4j")  # it logs the options that this test gives
    frame = source.batch(stream=stream)
    shown = [frame._jdf.queryExecution().toString(), str(frame.collect())]
    with pytest.raises(PySparkException, match="no-such-stream") as missing:
        source.batch(stream=f"{source.pool}-no-such-stream").collect()
    with pytest.raises(PySparkException, match="The option uri is refused") as option:
        source.batch(stream=stream, uri=source.uri)
    source.uri_file.write_text(source.uri.replace(password, password + "wrong"))
    with pytest.raises(PySparkException, match="refused the user or the password") as refused:
        source.batch(stream=stream).collect()
    errors = [str(error.value) + repr(error.value) for error in (missing, option, refused)]
    assert password not in "".join([*shown, *errors, *capfd.readouterr(), caplog.text])


def test_a_read_goes_on_after_its_connection_was_lost(source, broker):
    stream = source.fill("log", numbered(3_000))
    options = parse_options({key: str(value) for key, value in source.options(stream=stream, prefetch=100).items()})
    with BlockingBroker(options) as blocking:
        messages = blocking.read(stream, StreamRange(0, 3_000))
        offsets = [one.offset for one in next(messages)]
        asyncio.run(close_connections(broker.management_uri, name="osrdyne rabbitmq-stream"))
        offsets += [one.offset for several in messages for one in several]
    assert offsets == list(range(3_000))
