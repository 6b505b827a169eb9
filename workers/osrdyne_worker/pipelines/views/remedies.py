"""What to do about data that Spark cannot read, by the error of Spark. Pure."""

from __future__ import annotations

import re

_REMEDIES = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (
            "COLUMN_ALREADY_EXISTS",
            "set spark.sql.caseSensitive to true in worker.spark_conf, or rename one of the columns",
        ),
        (
            r"TIMESTAMP\(NANOS",
            "set spark.sql.legacy.parquet.nanosAsLong to true in worker.spark_conf, or write the file with "
            'microseconds (pandas and pyarrow: coerce_timestamps="us")',
        ),
        ("UNSUPPORTED_TIME_TYPE", "set spark.sql.timeType.enabled to true in worker.spark_conf"),
        ("CANNOT_MERGE", "set `columns`, or write all files with the same types"),
        ("'basePath'", "options.basePath is the absolute path of a directory that contains `path`"),
        (r"\(UUID\)", "set `columns` with the type binary for it, or write the column as text"),
        ("FLOAT16", "write the column as float"),
        ("DECIMAL_PRECISION_EXCEEDS", "write the column with at most 38 digits, or as text"),
        ("PARQUET_TYPE", "write the column with another type, or leave it out of `columns`"),
        (
            "MALFORMED_RECORD|_corrupt_record|CORRUPT_RECORD",
            "set options.multiLine to true if a record has several lines",
        ),
        ("UNABLE_TO_INFER_SCHEMA", "set `columns`"),
        (
            "READ_FILE_FOOTER",
            "set options.pathGlobFilter, to *.parquet for example, if it is no data",
        ),
    )
)


def remedy(condition: str, message: str) -> str:
    """`; ` and what to do about the error, or nothing. `condition`: the error class of Spark."""
    found = next((text for pattern, text in _REMEDIES if pattern.search(condition) or pattern.search(message)), None)
    return "" if found is None else f"; {found}"
