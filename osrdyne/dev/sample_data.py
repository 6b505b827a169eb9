"""Sample data for `osrdyne dev` and the demo: TPC-H tables, generated once into a cache directory.

The generator is `tpchgen-cli` (PyPI), which is part of the development dependencies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from osrdyne.errors import ConfigurationError
from osrdyne.user_directories import cache_directory

KEY_COLUMNS: Mapping[str, Sequence[str]] = {
    "customer": ["c_custkey"],
    "lineitem": ["l_orderkey"],
    "nation": ["n_nationkey"],
    "orders": ["o_orderkey"],
    "part": ["p_partkey"],
    "partsupp": ["ps_partkey", "ps_suppkey"],
    "region": ["r_regionkey"],
    "supplier": ["s_suppkey"],
}
"""The tables, and the columns by which `/lookup` finds their rows."""
KEY_PATTERN = "tpch/sf={scale}"
GENERATION_TIMEOUT = 600.0
"""Seconds for one scale factor."""


def default_directory() -> Path:
    """The directory of sample data, below the user's cache directory."""
    return cache_directory() / "sample-data"


def generate_tpch(directory: Path, scale: str) -> Path:
    """Generate the tables at a scale factor (1 is 1 GB of text) as Parquet, unless they exist.

    Returns the directory of the tables. Raises `ConfigurationError` if the directory cannot be written to, or if the
    generator is missing, fails or takes too long.
    """
    target = directory / "tpch" / f"sf={scale}"
    try:
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"The sample data cannot be written to {target.parent}: {error.strerror}. Set XDG_CACHE_HOME to a "
            "directory in which you may write."
        ) from error
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    command = [_generator(), "parquet", "--scale-factor", scale, "--output-dir", str(unfinished)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=GENERATION_TIMEOUT)
        unfinished.rename(target)
    except subprocess.CalledProcessError as error:
        raise ConfigurationError(f"tpchgen-cli failed: {error.stderr.strip()[-500:]}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(
            f"tpchgen-cli did not generate the scale factor {scale} within {GENERATION_TIMEOUT:g} s: use a smaller one."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _generator() -> str:
    found = shutil.which("tpchgen-cli", path=sysconfig.get_path("scripts")) or shutil.which("tpchgen-cli")
    if found is None:
        raise ConfigurationError("The sample data needs tpchgen-cli: pip install tpchgen-cli, or give --config.")
    return found


def sql_configuration(directory: Path) -> dict[str, object]:
    """The `worker.config` of the SQL pipeline over the sample data."""
    tables = [
        {
            "view": table,
            "format": "parquet",
            "path": f"{KEY_PATTERN}/{table}.parquet",
            "cache": table == "lineitem",
            "key_columns": list(columns),
        }
        for table, columns in KEY_COLUMNS.items()
    ]
    return {"base_directory": str(directory), "datasets": [{"key": KEY_PATTERN, "tables": tables}]}
