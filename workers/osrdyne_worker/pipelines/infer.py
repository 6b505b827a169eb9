"""Print the columns of a key's views, for `columns` in the configuration.

`osrdyne spark infer-columns` runs `python -m osrdyne_worker.pipelines.infer`, with the settings of the pool in
`WORKER_CONFIG` and the key in `WORKER_KEY_ESCAPED`. With `columns` given, a worker reads no file before it opens the
view.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from osrdyne.errors import OsrdyneError
from osrdyne.logs import configure_logging
from osrdyne.protocol.environment import config_from_variables, read_key
from osrdyne.protocol.names import parse_key
from osrdyne_worker.app.app import Context
from osrdyne_worker.pipelines.guard.sessions import sessions
from osrdyne_worker.pipelines.views.datasets import LIVE, SqlConfig, parse_config
from osrdyne_worker.pipelines.views.loading import View, dataset_of, load


def infer(worker_config: Mapping[str, Any], key: str) -> dict[str, str]:
    """The columns of each view of the key as DDL. Raises `OsrdyneError`."""
    context = Context(key=parse_key(key), worker_config=worker_config, config=worker_config.get("app") or {})
    config = _without_columns(parse_config(context.config))
    context = replace(context, session=sessions.build(context))
    try:
        views = load(context.session, dataset_of(config, key, context.session))
        return {view.name: ddl(view) for view in views if view.format not in {"table"} | LIVE}
    finally:
        sessions.close(context.session)


def _without_columns(config: SqlConfig) -> SqlConfig:
    """The configuration without `columns` and `cache`: columns are read from the data, and nothing is cached."""
    datasets = tuple(
        dataset.model_copy(
            update={
                "tables": tuple(table.model_copy(update={"columns": None, "cache": False}) for table in dataset.tables)
            }
        )
        for dataset in config.datasets
    )
    return config.model_copy(update={"datasets": datasets})


def ddl(view: View) -> str:
    return ", ".join(f"{quoted(name)} {kind}" for name, kind, _ in view.columns)


def quoted(name: str) -> str:
    """A name as DDL needs it: all but plain names in backticks."""
    plain = name.isascii() and name.isidentifier() and name.lower() not in {"end", "time", "interval", "timestamp"}
    return name if plain else f"`{name.replace('`', '``')}`"


def as_yaml(columns: Mapping[str, str]) -> Iterable[str]:
    """Lines for `tables` of a dataset. JSON text is YAML text."""
    for view, text in columns.items():
        yield f"- view: {view}"
        yield f"  columns: {json.dumps(text, ensure_ascii=False)}"


def main() -> None:
    configure_logging(level="error")
    try:
        columns = infer(config_from_variables(os.environ), read_key(os.environ))
    except OsrdyneError as error:
        sys.exit(error.message)
    sys.stdout.write("".join(f"{line}\n" for line in as_yaml(columns)))


if __name__ == "__main__":
    main()
