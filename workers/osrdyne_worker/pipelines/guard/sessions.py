"""The Spark sessions of the SQL pipeline: the settings that it depends on, and the masters that it accepts.

A module of its own, and the first that `sql` imports: a worker starts its JVM when the sessions are made, and the other
modules, with pyspark, pyarrow and sqlglot, are imported while the JVM starts. It imports none of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from osrdyne.errors import ConfigurationError
from osrdyne_worker.app.app import Context, KeySessions
from osrdyne_worker.pipelines.views.datasets import parse_config
from osrdyne_worker.spark.cluster import read_master
from osrdyne_worker.spark.failures.missing_jars import delta_problem
from osrdyne_worker.spark.session import SparkSessions

if TYPE_CHECKING:
    from osrdyne_worker.pipelines.warm_up import WarmUp

REQUIRED_SETTINGS = {
    # Spark would replace ${...} in a query by settings and environment variables, secrets included.
    "spark.sql.variable.substitute": "false",
    # A second defence: csv.`/etc/passwd` is not a table.
    "spark.sql.runSQLOnFiles": "false",
    # Spark would evaluate a VALUES clause during parsing, before any check.
    "spark.sql.parser.eagerEvalOfUnresolvedInlineTable": "false",
    # Spark opens the files in options of functions with Hadoop's file systems; these ones would request a URL.
    **{f"spark.hadoop.fs.{scheme}.impl": "osrdyne.refused" for scheme in ("http", "https", "ftp", "sftp")},
}

# XML in a query must not make the JVM read files or request URLs.
REQUIRED_JAVA_OPTIONS = " ".join(f"-Djavax.xml.accessExternal{kind}=" for kind in ("DTD", "Schema", "Stylesheet"))


class GuardedSessions(SparkSessions):
    """Sessions whose plans can be checked. Refuses Spark Connect, where plans stay on the server."""

    _warm_up: WarmUp | None = None
    """The warm-up of a pooled process, which ends when its first key arrives."""

    def build(self, context: Context) -> Any:
        if read_master(context.worker_config).is_connect and not parse_config(context.config).allow_unguarded:
            raise ConfigurationError(
                "worker.spark_master is a Spark Connect address: the SQL pipeline cannot check the plans of queries "
                "there, and a query may read anything that the server can read. Use another master, or set "
                "worker.config.allow_unguarded: true."
            )
        return super().build(context)

    def check_settings(self, worker_config: Mapping[str, Any]) -> None:
        """Raise `ConfigurationError` if a dataset needs Delta Lake, which has no jar for the installed Spark."""
        super().check_settings(worker_config)
        config = parse_config(worker_config.get("app") or {})
        if any(table.format == "delta" for dataset in config.datasets for table in dataset.tables):
            problem = delta_problem((worker_config.get("spark") or {}).get("conf") or {})
            if problem is not None:
                raise ConfigurationError(f"worker.config.datasets has a table of the format delta. {problem}")

    def build_shared(self, context: Context) -> Any:
        from osrdyne_worker.pipelines.warm_up import WarmUp  # imports pyspark

        shared = super().build_shared(context)
        self._warm_up = WarmUp(super().for_key(shared), context)
        self._warm_up.start()
        return shared

    def for_key(self, shared: Any) -> KeySessions:
        # The warm-up would compete with the key for processors, which costs the key more time than it saves.
        if self._warm_up is not None:
            self._warm_up.stop()
        return super().for_key(shared)

    def close(self, session: Any) -> None:
        if self._warm_up is not None:
            self._warm_up.close()
        super().close(session)


sessions = GuardedSessions(required=REQUIRED_SETTINGS, java_options=REQUIRED_JAVA_OPTIONS)
