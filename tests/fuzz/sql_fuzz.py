"""Fuzzer of the SQL pipeline's plan check: makes statements from seeds and runs them against Spark itself.

`make fuzz-sql COUNT=100000` runs it with the statements of sqlglot's and Spark's own test files, which pip and Maven
fetch into a cache; a short run on the queries of this repository is a test (tests/security/test_sql_fuzz.py). The plan
check decides alone here, as it does where sqlglot cannot read a text. What it accepts is judged by what Spark prints of
the analysed plan, without code of the guard; and no text may touch the canaries: a file, a property of the JVM and an
HTTP server on loopback.
"""

import argparse
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from osrdyne_worker.pipelines.guard.plan_guard import check_analyzed, check_parsed
from osrdyne_worker.pipelines.guard.refusals import QueryNotReadError, QueryRefusedError
from osrdyne_worker.pipelines.guard.sql_guard import check_query
from osrdyne_worker.spark.plans import analyzed_plan, frame_of, parse_query

TESTS = Path(__file__).resolve().parents[1]
MARKER = "osrdyne_marker(1)"
SECRET = "osrdyne_secret"
SPARK_TESTS = "org.apache.spark:spark-sql_2.13:4.2.0:jar:tests"
"""The newest release whose test files are published."""

TOKEN = re.compile(
    r"""--(?:\\\n|[^\n])*|/\*.*?\*/|'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.)*"|`[^`]*`|\w+(?:\.\w+)?|\s+|<=>|<>|>>>|\|\||::|->|.""",
    re.DOTALL,
)
_SOURCES = re.compile(
    r"\b(?:Relation|LogicalRDD|LogicalRelation|HiveTableRelation|InMemoryRelation|DataSourceV2\w*|RelationV2|StreamingRelation\w*"
    r"|ExternalRDD|CommandResult|LogicalQueryStage)\b(?! \[(?:[a-z]{1,2}_\w+#\d+L?[,\]]| ?\.\.\.))"
)
"""A leaf of a printed plan that holds stored data and whose first column is none of TPC-H's."""


class CanaryServer:
    """An HTTP server on loopback that must receive no request."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append(self.path)
                self.send_error(404)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Statements:
    """Draws texts: a seed, changed a few times."""

    def __init__(
        self, seeds: list[str], views: list[str], canary_file: Path, canary_url: str, rng: random.Random
    ) -> None:
        self._seeds = seeds
        self._views = views
        self._rng = rng
        # These words stand for the canaries while a text is drawn, so that it depends on the seed alone.
        self._canaries = {"canary_file": str(canary_file), "canary_url": canary_url}
        xsd = "map('rowTag','a','rowValidationXSDPath','%s')"
        self._hostile = [
            "hidden", "global_temp.hidden", "default.hidden", "spark_catalog.default.hidden", "`hidden`",
            "text.`canary_file`", "csv.`canary_file`", "`text`.`canary_file`",
            "identifier('hidden')", "table(hidden)",
            "identifier('hid' || 'den')", "(select osrdyne_secret from hidden)",
            "(with t as (select * from hidden) select * from t)",
            "(table hidden)", "(from hidden)", "exists (from hidden)",
            f"from_xml('<a/>', 'x string', {xsd % 'file://canary_file'})",
            f"from_xml('<a/>', 'x string', {xsd % 'canary_url/x'})",
            "read_files('canary_file')", "schema_of_xml('<!DOCTYPE a SYSTEM \"canary_url/d\"><a/>')",
            "xpath('<!DOCTYPE a SYSTEM \"canary_url/x\"><a/>', 'a')",
            "java_method('java.lang.System', 'setProperty', 'osrdyne.canary', 'yes')",
            "reflect('java.lang.System', 'setProperty', 'osrdyne.canary', 'yes')",
            "try_reflect('java.lang.System', 'setProperty', 'osrdyne.canary', 'yes')",
            "`java_method`('java.lang.System', 'setProperty', 'osrdyne.canary', 'yes')",
            "system.builtin.java_method('java.lang.System', 'setProperty', 'osrdyne.canary', 'yes')",
            "input_file_name()", "current_user()", "session_user", "current_catalog()",
        ]  # fmt: skip
        self.hostile = [self._with_canaries(text) for text in self._hostile]
        self._glue = ["'", '"', "`", "(", ")", ",", ";", "--", "-- \\\n", "\\\n", "\n", "/*", "*/", "/*+",
                      "/*+ broadcast(t) */", "::", "->", "=>", ":", ".", "*", "{", "}", "${x}", "?", ":p", "|>", "\r",
                      "\u00a0", "\u2028"]  # fmt: skip
        self._words = sorted({token for seed in seeds for token in TOKEN.findall(seed) if token.strip()})

    def draw(self) -> str:
        text = self._rng.choice(self._seeds)
        if self._rng.random() < 0.6:
            text = self._over_views(text)
        for _ in range(self._rng.choice((0, 1, 1, 1, 1, 2, 2, 3))):
            text = self._changed(text)
        # Large numbers make bombs, which other tests are about.
        return self._with_canaries(re.sub(r"\d{5,}|\d+[eE]\+?\d+", "7", text)[:6000])

    def _with_canaries(self, text: str) -> str:
        for name, address in self._canaries.items():
            text = text.replace(name, address)
        return text

    def _over_views(self, text: str) -> str:
        """The text with the key's views as its relations, so that more texts pass."""
        tokens = TOKEN.findall(text)
        for index in range(2, len(tokens)):
            if tokens[index - 2].lower() in ("from", "join", "table") and re.match(r"[\w`]", tokens[index]):
                tokens[index] = self._rng.choice(self._views)
        return "".join(tokens)

    def _changed(self, text: str) -> str:
        rng = self._rng
        tokens = TOKEN.findall(text) or ["select", " ", "1"]
        places = [
            index for index, token in enumerate(tokens) if token.strip() and not token.startswith(("--", "/*"))
        ] or [0]
        place = rng.choice(places)
        kind = rng.randrange(13)
        if kind <= 3:  # something hostile where a name or a value is
            named = [index for index in places if re.match(r"[\w'`\"]", tokens[index])] or places
            tokens[rng.choice(named)] = rng.choice(self._hostile)
        elif kind == 4:
            tokens[place] = MARKER
        elif kind == 5:
            return self._over_views(text)
        elif kind == 6:
            del tokens[place]
        elif kind == 7:
            tokens.insert(place, rng.choice(self._words) + " ")
        elif kind == 8:
            tokens.insert(place, rng.choice(self._glue))
        elif kind == 9:
            other = rng.choice(places)
            tokens[place], tokens[other] = tokens[other], tokens[place]
        elif kind == 10:
            tokens[place] = f"({rng.choice(self._seeds).rstrip().rstrip(';')})"
        elif kind == 11:
            template = rng.choice((
                "select * from ({}) t", "with hidden as ({}) select * from hidden",
                "with t as ({}) select * from t, hidden",
                "with recursive hidden as ({}) select 1", "select ({})", "select 1 where exists ({})",
                "{} union all table nation",
                "from ({}) select *", "select * from nation, lateral ({})",
                "select sum(1) over w from nation window w as (partition by ({}))",
            ))  # fmt: skip
            return template.format(text.rstrip().rstrip(";"))
        else:
            tokens[place:] = TOKEN.findall(rng.choice(self._seeds))[rng.randrange(8) :]
        return "".join(tokens)


@dataclass
class Outcome:
    """What a run found; `violations` must stay empty."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def found(self, what: str, text: str) -> None:
        self.counts["violations"] += 1
        self.violations.append(f"{what}: {text!r}")


class Fuzzer:
    """Runs statements in a session whose key's views are TPC-H's and which has other data besides."""

    def __init__(self, session: Any, views: list[str], seeds: list[str], directory: Path, *, seed: int) -> None:
        self._session = session
        self._views = frozenset(views)
        self._rng = random.Random(seed)
        self._server = CanaryServer()
        self._file = directory / "canary.txt"
        self._file.write_text(f"{SECRET}\nvalue\n")
        session.read.option("header", True).csv(str(self._file)).createOrReplaceTempView("hidden")
        session.table("hidden").createOrReplaceGlobalTempView("hidden")
        os.utime(self._file, (1, time.time()))  # the first read after this changes the time of access
        self._read_at = self._file.stat().st_atime
        self._statements = Statements(seeds, views, self._file, self._server.url, self._rng)
        self._system = session._jvm.java.lang.System

    def run(self, count: int, *, execute: float = 0.02, seconds: float = float("inf")) -> Outcome:
        outcome, end = Outcome(), time.monotonic() + seconds
        for number in range(count):
            if time.monotonic() > end:
                break
            text = self._statements.draw()
            outcome.counts["texts"] += 1
            self._try(text, outcome, execute)
            if number % 50 == 49:
                self._look_at_canaries(outcome, text)
        self._look_at_canaries(outcome, "the last texts")
        return outcome

    def close(self) -> None:
        self._server.close()

    def _try(self, text: str, outcome: Outcome, execute: float) -> None:
        try:
            parsed = parse_query(self._session, text)
        except (PySparkException, Py4JJavaError):
            outcome.counts["not read by Spark"] += 1
            return
        assert parsed is not None
        try:
            check_parsed(parsed.description, views=self._views)
        except QueryRefusedError as error:
            outcome.counts[f"refused as parsed: {error.error_code}"] += 1
            outcome.counts["unknown function seen"] += MARKER.partition("(")[0] in error.message
            return
        if MARKER in text and not _hidden(text, MARKER):
            outcome.found("the plan check does not see the unknown function", text)
        try:
            frame = frame_of(self._session, parsed)
        except (PySparkException, Py4JJavaError):
            outcome.counts["not analysed by Spark"] += 1
            return
        try:
            check_analyzed(analyzed_plan(frame, views=self._views) or "")
        except QueryRefusedError as error:
            outcome.counts[f"refused as analysed: {error.error_code}"] += 1
            return
        outcome.counts["accepted by the plan check"] += 1
        self._judge(frame, text, outcome)
        with suppress(RecursionError):
            try:
                check_query(text, views=self._views)
                outcome.counts["accepted by both nets"] += 1
            except QueryNotReadError:
                outcome.counts["accepted; not read by sqlglot"] += 1
            except QueryRefusedError as error:
                outcome.counts[f"refused by the first net alone: {error.error_code}"] += 1
        hostile = any(fragment in text for fragment in self._statements.hostile)
        if hostile or self._rng.random() < execute:
            self._run(frame, outcome)

    def _judge(self, frame: Any, text: str, outcome: Outcome) -> None:
        printed = str(frame._jdf.queryExecution().analyzed().toString())
        other = _SOURCES.search(printed)
        if SECRET + "#" in printed or other:
            outcome.found(f"the plan reads other data ({other[0] if other else SECRET})", text)

    def _run(self, frame: Any, outcome: Outcome) -> None:
        """With constants folded; tasks are cancelled after a while, as a cross join may be long."""
        outcome.counts["run"] += 1
        timer = threading.Timer(20, self._session.sparkContext.cancelAllJobs)
        timer.start()
        try:
            frame._jdf.limit(3).collectToPython()
        except (PySparkException, Py4JJavaError):
            outcome.counts["run with an error"] += 1
        finally:
            timer.cancel()

    def _look_at_canaries(self, outcome: Outcome, text: str) -> None:
        if self._server.requests:
            outcome.found(f"a URL was requested: {self._server.requests}", text)
            self._server.requests.clear()
        if self._file.stat().st_atime != self._read_at:
            outcome.found("the canary file was read", text)
            os.utime(self._file, (1, time.time()))
        if self._system.clearProperty("osrdyne.canary") is not None:
            outcome.found("a property of the JVM was set", text)


def _hidden(text: str, part: str) -> bool:
    """Whether `part` may stand in a quote or in a comment."""
    return any(part in token for token in TOKEN.findall(text) if token[:1] in "'\"`-/")


def own_seeds() -> list[str]:
    """The queries of this repository."""
    found: list[str] = []
    for name in ("accepted.yaml", "spark_only.yaml", "tpch.yaml"):
        found += yaml.safe_load((TESTS / "queries" / name).read_text(encoding="utf-8")).values()
    for group in yaml.safe_load((TESTS / "queries" / "refused.yaml").read_text(encoding="utf-8")).values():
        found += group.values()
    return [text for text in found if text.strip()]


def fetched_seeds(cache: Path) -> list[str]:
    """Statements of sqlglot's source distribution and of Spark's test files, fetched once; prints what is missing."""
    cache.mkdir(parents=True, exist_ok=True)
    return [*_sqlglot_seeds(cache), *spark_seeds(cache)]


def _sqlglot_seeds(cache: Path) -> Iterator[str]:
    archives = list(cache.glob("sqlglot-*.tar.gz"))
    if not archives:
        import sqlglot

        command = [sys.executable, *["-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]]
        subprocess.run([*command, "--dest", cache, f"sqlglot=={sqlglot.__version__}"], check=False)
        archives = list(cache.glob("sqlglot-*.tar.gz"))
    if not archives:
        print("sqlglot's source distribution cannot be fetched; its statements are left out")
        return
    with tarfile.open(archives[0]) as archive:
        for member in archive.getmembers():
            if re.search(r"tests/fixtures/.*\.sql$", member.name) and (file := archive.extractfile(member)) is not None:
                yield from _split(file.read().decode())
            elif re.search(r"tests/dialects/test_(spark|databricks|hive)\.py$", member.name) and (
                file := archive.extractfile(member)
            ):
                yield from re.findall(r'"((?:SELECT|WITH|FROM|VALUES|TABLE) [^"\n]+)"', file.read().decode())


def spark_tests(cache: Path) -> Path | None:
    """The jar of Spark's own tests, by Maven; None without it."""
    jar = cache / "spark-sql-tests.jar"
    if not jar.exists() and shutil.which("mvn"):
        plugin = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
        arguments = [f"-Dartifact={SPARK_TESTS}", f"-DoutputDirectory={cache}", "-Dmdep.stripVersion=true"]
        subprocess.run(["mvn", "-q", "-B", plugin, *arguments], check=False, stdout=subprocess.DEVNULL)
        for copied in cache.glob("spark-sql_*-tests.jar"):
            copied.rename(jar)
    return jar if jar.exists() else None


def spark_seeds(cache: Path) -> Iterator[str]:
    jar = spark_tests(cache)
    if jar is None:
        print(f"{SPARK_TESTS} cannot be fetched (is Maven installed?); its statements are left out")
        return
    with zipfile.ZipFile(jar) as archive:
        for name in archive.namelist():
            if re.match(r"(sql-tests/inputs|tpcds|tpch|ssb).*\.sql$", name) and "/udf/" not in name:
                yield from _split(archive.read(name).decode())


def _split(text: str) -> Iterator[str]:
    """Statements that end with a semicolon at the end of a line; comment lines are left out."""
    lines: list[str] = []
    for line in [*text.splitlines(), ";"]:
        if line.lstrip().startswith("--"):
            continue
        lines.append(line)
        if line.rstrip().endswith(";"):
            statement = "\n".join(lines).strip().rstrip(";").strip()
            lines = []
            if 3 < len(statement) < 4000:
                yield statement


def main() -> None:
    from osrdyne.protocol.names import Key
    from osrdyne_worker import Context
    from osrdyne_worker.pipelines.sql import SqlData, sessions
    from osrdyne_worker.pipelines.views.datasets import SqlConfig

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "osrdyne" / "fuzz")
    arguments = parser.parse_args()
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL + 1)
    seeds = own_seeds()
    seeds += [seed for seed in fetched_seeds(arguments.cache) if seed not in set(seeds)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        generator = Path(sys.executable).with_name("tpchgen-cli")
        subprocess.run(
            [generator, "parquet", "-s", "0.001", "--output-dir", directory / "data"], check=True, capture_output=True
        )
        views = sorted(path.stem for path in (directory / "data").iterdir())
        tables = [{"view": view, "path": f"{directory}/data/{view}.parquet"} for view in views]
        spark = {"master": "local[1]", "conf": {"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": 1}}
        session = sessions.build(Context(key=Key("fuzz"), pool="fuzz", worker_config={"spark": spark}))
        session.sparkContext.setLogLevel("OFF")
        data = SqlData(session, SqlConfig.model_validate({"datasets": [{"key": "fuzz", "tables": tables}]}), "fuzz")
        data.load()
        data.views()  # opens all of them
        fuzzer = Fuzzer(session, views, seeds, directory, seed=arguments.seed)
        started = time.monotonic()
        outcome = fuzzer.run(arguments.count, seconds=arguments.seconds)
        fuzzer.close()
        sessions.close(session)
    report = {"seed": arguments.seed, "seeds": len(seeds), "seconds": round(time.monotonic() - started)}
    print(json.dumps({**report, **dict(sorted(outcome.counts.items()))}, indent=1))
    for violation in outcome.violations[:50]:
        print(violation)
    sys.exit(1 if outcome.violations else 0)


if __name__ == "__main__":
    main()
