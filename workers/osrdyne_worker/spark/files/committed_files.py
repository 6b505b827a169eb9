"""A DataFrame over a given list of Parquet files, which are divided by date and hour.

`session.read.parquet(*files)` checks and lists each file, and starts a job for that if there are more than 32 of them.
`CommittedFileIndex.java` gives Spark the list instead. Used by the SQL pipeline for tables of telemetry.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files
from typing import Any

from osrdyne_worker.spark.java.janino import compiled_method


def committed_frame(session: Any, directory: str, listed: Iterable[tuple[str, str, str, int]], *, columns: str) -> Any:
    """The rows of files in a local directory, with the columns `date` and `hour` behind those of the data.

    `listed`: date, hour, name and size of each file, none with a space; `columns`: of the data files, as DDL.
    """
    lines = [f"{date} {hour} {name} {size}" for date, hour, name, size in listed]
    if not hasattr(session, "_jsparkSession"):  # Spark Connect: the server has no such class
        schema = f"{columns}, date date, hour int"
        if not lines:
            return session.createDataFrame([], schema)
        paths = [f"{directory}/date={d}/hour={h}/{name}" for d, h, name, _ in (line.split(" ") for line in lines)]
        return session.read.schema(schema).option("basePath", directory).parquet(*paths)
    from pyspark.sql.classic.dataframe import DataFrame

    gateway = session.sparkContext._gateway
    arguments = gateway.new_array(gateway.jvm.Object, 4)
    for place, value in enumerate((session._jsparkSession, directory, "\n".join(lines), columns)):
        arguments[place] = value
    relation = _relation_method(gateway).invoke(None, arguments)
    return DataFrame(session._jsparkSession.baseRelationToDataFrame(relation), session)


@lru_cache(maxsize=1)
def _relation_method(gateway: Any) -> Any:
    return compiled_method(gateway, files(__package__) / "CommittedFileIndex.java", "relation")
