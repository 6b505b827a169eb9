"""Honest queries that the SQL pipeline must not refuse: those of TPC-DS, and the read-only ones of Spark's own tests.

`make sql-corpora` takes both from Spark's test files, which Maven fetches into a cache, and prints what the guard and
the query limits refuse, by reason. It fails when a query of TPC-DS is refused, or when 1 % of the statements of Spark's
tests are refused that should not be. A test of `make test` (tests/spark/test_tpcds.py) does the first part with another
copy of the queries. The texts of TPC-DS have a licence of their own and are not in this repository.
"""

import argparse
import json
import logging
import os
import random
import re
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from osrdyne_worker.pipelines.guard.refusals import QueryRefusedError
from osrdyne_worker.pipelines.sql import SqlData
from osrdyne_worker.pipelines.views.datasets import SqlConfig
from osrdyne_worker.spark.plans import parse_query

from .sql_fuzz import SPARK_TESTS, TESTS, spark_tests

_READ_ONLY = re.compile(r"(?is)\s*(?:\(|select\b|with\b|values\b|from\b|table\b)")
_OTHER_LANGUAGES = re.compile(r"pipe|scripting|session-variables|identifier-clause|param|execute-immediate")
"""Files about what the pipeline does not offer: pipes, scripts, variables, IDENTIFIER, parameters."""

RIGHTLY_REFUSED = {
    "a program is run": re.compile(r"TRANSFORM \.\.\. USING|ScriptTransformation"),
    "a variable of the session": re.compile(r"VariableReference"),
    "a function that reads or shows other things": re.compile(
        r"(?:from_xml|schema_of_xml|xpath\w*|java_method|reflect|try_reflect|input_file_\w+|current_user|session_user|user"
        r"|current_catalog|current_database|current_schema|current_path|\w+_(?:avro|protobuf)|sql_keywords|collations)\b"
    ),
}
"""Refusals that the pipeline promises, by their messages."""


def tpcds_tables() -> dict[str, str]:
    """The columns of each table of TPC-DS, as DDL."""
    found: dict[str, str] = yaml.safe_load((TESTS / "queries" / "tpcds_schema.yaml").read_text(encoding="utf-8"))
    return found


def write_tpcds(directory: Path) -> dict[str, Any]:
    """Write the tables without rows; the configuration of a worker for the key `tpcds` over them."""
    tables = []
    for table, columns in tpcds_tables().items():
        fields = [column.split(" ") for column in columns.split(", ")]
        schema = pa.schema([(name, _arrow_type(kind)) for name, kind in fields])
        pq.write_table(schema.empty_table(), directory / f"{table}.parquet")
        tables.append({"view": table, "path": f"{directory}/{table}.parquet"})
    return {"datasets": [{"key": "tpcds", "tables": tables}]}


def _arrow_type(kind: str) -> Any:
    name, *numbers = re.findall(r"\w+", kind)
    if name == "decimal":
        return pa.decimal128(*map(int, numbers))
    return {"int": pa.int32(), "bigint": pa.int64(), "date": pa.date32()}.get(name, pa.string())


def tpcds_queries(jar: Path) -> dict[str, str]:
    """The queries of TPC-DS in Spark's tests: versions 1.4 and 2.7, and modified ones."""
    with zipfile.ZipFile(jar) as archive:
        names = [name for name in archive.namelist() if re.fullmatch(r"tpcds[^/]*/[^/]+\.sql", name)]
        return {name: archive.read(name).decode() for name in sorted(names)}


def refusals(data: SqlData, queries: Mapping[str, str]) -> dict[str, str]:
    """What the pipeline answers, by name, of the queries that it does not accept; none is run."""
    found = {}
    for name, text in queries.items():
        for statement in re.split(r";\s*(?:\n|$)", re.sub(r"(?m)^\s*--.*\n", "", text)):
            if statement.strip():
                try:
                    data.frame(statement)
                except (QueryRefusedError, PySparkException, Py4JJavaError) as error:
                    found[name] = str(error)[:300]
    return found


def spark_statements(jar: Path) -> dict[str, list[str]]:
    """The statements of each file of Spark's SQL tests, split as these tests do."""
    found: dict[str, list[str]] = {}
    with zipfile.ZipFile(jar) as archive:
        for name in archive.namelist():
            if re.match(r"sql-tests/inputs/(?!udf/|.*/udf/).*\.sql$", name) and not _OTHER_LANGUAGES.search(name):
                lines = [line for line in archive.read(name).decode().splitlines() if not line.strip().startswith("--")]
                parts = re.split(r"(?<!\\);\s*\n", "\n".join(lines) + "\n")
                found[name.removeprefix("sql-tests/inputs/")] = [part.strip() for part in parts if part.strip()]
    return found


@dataclass
class Counts:
    """What came of the statements; `wrong` has those that should have been accepted."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, str]] = field(default_factory=list)


class SparkTests:
    """Runs files of Spark's tests; every table and view of theirs stands for a view of the key."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._built_in = {str(name) for name in self._names_of_functions(session)}

    def run(self, files: Mapping[str, list[str]], names: list[str], *, seconds: float) -> Counts:
        found, end = Counts(), time.monotonic() + seconds
        for name in names:
            if time.monotonic() > end:
                break
            found.counts["files"] += 1
            session = self._session.newSession()
            session._jvm.SparkSession.setActiveSession(session._jsparkSession)
            views: dict[str, int] = {}
            for statement in files[name]:
                if time.monotonic() > end:
                    break
                if _READ_ONLY.match(statement):
                    self._ask(session, name, statement, views, found)
                else:
                    self._prepare(session, statement)
            self._clear(session)
        return found

    def _ask(self, session: Any, name: str, statement: str, views: dict[str, int], found: Counts) -> None:
        try:
            parsed = parse_query(session, statement)
        except (PySparkException, Py4JJavaError):
            found.counts["not read by Spark"] += 1
            return
        assert parsed is not None
        relations = list(_relations(parsed.description))
        if any(len(relation) != 1 for relation in relations):
            found.counts["names tables of other schemas"] += 1
            return
        for (relation,) in relations:
            self._make_view(session, relation, views)
        data = SqlData(session, SqlConfig.model_validate({"datasets": []}), "spark-tests")
        try:
            data.check(statement, views)
        except QueryRefusedError as error:
            if not self._analyses(session, statement):
                found.counts["not analysed by Spark"] += 1
                return
            reason = self._reason(error)
            found.counts["read-only"] += 1
            found.counts[f"refused: {reason or 'wrongly'}"] += 1
            if reason is None:
                found.wrong.append({"file": name, "statement": statement, "message": error.message})
        except (PySparkException, Py4JJavaError):
            found.counts["not analysed by Spark"] += 1
        else:
            found.counts["read-only"] += 1
            found.counts["accepted"] += 1

    def _reason(self, error: QueryRefusedError) -> str | None:
        """Why it is right to refuse, None when it is not."""
        for reason, message in RIGHTLY_REFUSED.items():
            if message.search(error.message):
                return reason
        named = re.search(r"'([\w.]+)'", error.message)
        if error.error_code == "function_not_allowed" and named and named[1].lower() not in self._built_in:
            return "a function that the test defines itself"
        return None

    @staticmethod
    def _names_of_functions(session: Any) -> list[str]:
        return [row[0] for row in session.sql("show system functions").collect()]

    @staticmethod
    def _make_view(session: Any, relation: str, views: dict[str, int]) -> None:
        quoted = "`" + relation.replace("`", "``") + "`"
        is_view = session._jsparkSession.sessionState().catalog().getTempView(relation).isDefined()
        try:
            table = session.table(quoted)
            if not is_view:
                table.createOrReplaceTempView(quoted)
            views[relation.lower()] = len(table.columns)
        except (PySparkException, Py4JJavaError):
            views.pop(relation.lower(), None)

    @staticmethod
    def _analyses(session: Any, statement: str) -> bool:
        try:
            session.sql(statement)
        except (PySparkException, Py4JJavaError):
            return False
        return True

    @staticmethod
    def _prepare(session: Any, statement: str) -> None:
        with suppress(PySparkException, Py4JJavaError):  # some of Spark's tests are about errors
            session.sql(statement)

    @staticmethod
    def _clear(session: Any) -> None:
        session.sql("use default")  # a test may end in a schema that it dropped
        for row in session.sql("show tables").collect():
            for kind in ("view", "table"):
                SparkTests._prepare(session, f"drop {kind} if exists `{row[1]}`")


def _relations(description: str) -> Iterator[list[str]]:
    for node in json.loads(description):
        if node["class"].endswith(".UnresolvedRelation"):
            yield node["values"].get("multipartIdentifier") or []


def main() -> None:
    from osrdyne.protocol.names import Key
    from osrdyne_worker import Context
    from osrdyne_worker.pipelines.sql import sessions

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "osrdyne" / "fuzz")
    parser.add_argument("--seed", type=int, default=1, help="order of the files of Spark's tests")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop with Spark's tests after this time")
    parser.add_argument("files", nargs="*", help="only these files of Spark's tests")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    arguments.cache.mkdir(parents=True, exist_ok=True)
    jar = spark_tests(arguments.cache)
    if jar is None:
        sys.exit(f"{SPARK_TESTS} cannot be fetched; install Maven, or put the jar into {arguments.cache}.")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.chdir(directory)  # Spark's tests make tables in the folder where they run
        spark = {"master": "local[1]", "conf": {"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": 1}}
        session = sessions.build(Context(key=Key("tpcds"), pool="corpora", worker_config={"spark": spark}))
        session.sparkContext.setLogLevel("OFF")
        data = SqlData(session, SqlConfig.model_validate(write_tpcds(directory)), "tpcds")
        data.load()
        queries = tpcds_queries(jar)
        refused = refusals(data, queries)
        print(json.dumps({"tpcds": Counter(name.split("/")[0] for name in queries), "refused": refused}, indent=1))
        files = spark_statements(jar)
        names = arguments.files or random.Random(arguments.seed).sample(sorted(files), len(files))
        found = SparkTests(session).run(files, names, seconds=arguments.seconds)
        sessions.close(session)
    share = len(found.wrong) / max(1, found.counts["read-only"])
    report = {"wrongly refused": f"{share:.2%}", "of files": len(files), **dict(sorted(found.counts.items()))}
    print(json.dumps(report, indent=1))
    for wrong in found.wrong:
        print(json.dumps(wrong))
    sys.exit(1 if refused or share >= 0.01 else 0)


if __name__ == "__main__":
    main()
