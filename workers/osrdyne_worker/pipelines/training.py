"""The training run that makes a class data sharing archive: `python -m osrdyne_worker.pipelines.training`.

It starts Spark as a worker does, opens small tables as the SQL pipeline does, and runs queries of the usual kinds. The
JVM then writes the classes that it has loaded and exits. `osrdyne spark warm-archive` runs this program; the
settings in `WORKER_CONFIG` decide about the class path.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from osrdyne.errors import ConfigurationError, OsrdyneError
from osrdyne.logs import configure_logging
from osrdyne.protocol.environment import config_from_variables
from osrdyne.protocol.messages import ARROW_TYPE, Request
from osrdyne.protocol.names import Key
from osrdyne_worker.app.app import Context
from osrdyne_worker.app.call import Call
from osrdyne_worker.pipelines.guard.sessions import REQUIRED_JAVA_OPTIONS, REQUIRED_SETTINGS, GuardedSessions
from osrdyne_worker.pipelines.sql import ExplainRequest, SqlRequest, explain, open_data, schema, sql
from osrdyne_worker.spark.java import jvm
from osrdyne_worker.spark.java.archive import (
    DRIVER_OPTIONS,
    EXTRA_CLASS_PATH,
    archive_in,
    archive_stem,
    recording,
    user_directory,
    written_aside,
)
from osrdyne_worker.spark.session import stop

EXIT_TIMEOUT = 300.0
"""Seconds for the JVM to write the archive."""

JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""The JVM ends soon: to optimise its code would take a third of the processor time. The archive is the same."""

TABLES = {
    "orders": "select id, id % 50 as customer, cast(id * 1.5 as decimal(12, 2)) as price, "
    "date_add(date'2024-01-01', cast(id % 365 as int)) as day, concat('order ', id) as comment, "
    "timestamp_seconds(id) as at, id % 2 = 0 as paid, cast(id as double) / 3 as weight from range(2000)",
    "customers": "select id, concat('customer ', id) as name, id % 5 as region from range(50)",
}
QUERIES = (
    "select 1",
    "select count(*) from orders",
    "select * from orders limit 10",
    "select region, sum(price) as total, avg(weight), min(day), max(comment), count(distinct customer) "
    "from orders join customers on orders.customer = customers.id where price > 10.5 and day >= date'2024-03-01' "
    "group by region having count(*) > 1 order by total desc limit 5",
    "select customer, id, row_number() over (partition by customer order by price desc) as n, "
    "sum(price) over (partition by customer order by id rows between 2 preceding and current row) from orders",
    "with big as (select customer, sum(price) as total from orders group by customer) "
    "select name, total from big left join customers on big.customer = customers.id "
    "where total > (select avg(total) from big) or name in (select name from customers where region = 1) order by 1",
    "select extract(year from day), date_trunc('month', at), upper(substring(comment, 1, 5)), "
    "case when paid then coalesce(price, 0) else -price end, cast(weight as string), comment like '%7%' "
    "from orders where customer between 3 and 7 order by id limit 100",
    "select customer, paid from orders where not exists (select 1 from customers where customers.id = orders.id) "
    "union all select id, true from customers order by customer limit 20",
)


def train(archive: Path, spark_conf: Mapping[str, str]) -> None:
    """Run the queries in a JVM that writes `archive` at its exit."""
    conf = {name: value for name, value in spark_conf.items() if name == EXTRA_CLASS_PATH}
    conf = recording({**conf, DRIVER_OPTIONS: JAVA_OPTIONS}, archive)
    conf = {"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2", **conf}
    sessions = GuardedSessions(required=REQUIRED_SETTINGS, java_options=REQUIRED_JAVA_OPTIONS)
    context = Context(key=Key("training"), worker_config={"spark": {"master": "local[2]", "conf": conf}})
    session = sessions.build(context)
    try:
        with tempfile.TemporaryDirectory(prefix="osrdyne-training-") as directory:
            _run(session, Path(directory))
        stop(session)
        running = jvm.process()
        if running is not None and running.stdin is not None:
            running.stdin.close()  # the JVM exits, and writes the archive before
            running.wait(EXIT_TIMEOUT)
    except BaseException:
        running = jvm.process()
        if running is not None:
            running.kill()  # it would write an archive of what it has loaded so far
        raise
    finally:
        jvm.end()


def _run(session: Any, directory: Path) -> None:
    for name, query in TABLES.items():
        session.sql(query).write.parquet(str(directory / name))
    tables = [{"view": name, "path": str(directory / name), "cache": name == "orders"} for name in TABLES]
    context = Context(
        key=Key("training"), config={"datasets": [{"key": "training", "tables": tables}]}, session=session
    )
    context = replace(context, state=open_data(context))
    for headers in ({}, {"accept": ARROW_TYPE}):
        call = Call(context, Request(key="training", body=b"", headers=headers))
        for query in QUERIES:
            sql(call, SqlRequest(query=query))
    explain(call, ExplainRequest(query=QUERIES[3]))
    schema(call)


class StoppedError(BaseException):
    """SIGTERM was received. A `BaseException`, so that no `except Exception` handles it as an error of Spark."""


def _stop(*_: object) -> None:
    raise StoppedError


def main() -> None:
    """Write the archive that workers of this installation look for, unless it is there."""
    parser = argparse.ArgumentParser(prog="osrdyne spark warm-archive")
    parser.add_argument("--directory", type=Path, default=user_directory())
    parser.add_argument("--again", action="store_true")
    parsed = parser.parse_args()
    configure_logging(level="error")
    os.setpgrp()
    signal.signal(signal.SIGTERM, _stop)
    try:
        archive = warm(parsed.directory, config_from_variables(os.environ), again=parsed.again)
    except OsrdyneError as error:
        sys.exit(error.message)
    except StoppedError:
        os.killpg(0, signal.SIGKILL)  # with a JVM that was just being started; what was written is removed already
    sys.stdout.write(f"{archive}\n")


def warm(directory: Path, worker_config: Mapping[str, object], *, again: bool) -> Path:
    """Make the archive in `directory`, unless it is there. Raises `ConfigurationError` or `StartFailedError`."""
    spark = worker_config.get("spark")
    configured = spark.get("conf") if isinstance(spark, dict) else None
    conf = {name: str(value) for name, value in (configured or {}).items()}
    jvm.require_java()
    stem = archive_stem(conf)
    if stem is None:
        raise ConfigurationError("This Python environment has no pyspark: install osrdyne[spark].")
    archive = archive_in(directory, stem)
    if again or archive is None:
        with written_aside(directory, stem) as unfinished:
            train(unfinished, conf)
        archive = archive_in(directory, stem)
    if archive is None:
        raise ConfigurationError(
            "Java wrote no archive. Its class path may have a directory with files in it: SPARK_CONF_DIR, "
            "HADOOP_CONF_DIR, YARN_CONF_DIR and spark.driver.extraClassPath can add one."
        )
    return archive


if __name__ == "__main__":
    main()
