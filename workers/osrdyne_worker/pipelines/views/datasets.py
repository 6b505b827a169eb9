"""The configuration of the SQL pipeline, and the dataset of a key. Pure, except for symbolic links to
`base_directory`; `loading` opens the data.

The models validate the worker's `app` configuration, `resolve` finds the dataset of a key. A part of a key becomes a
path component or a value that a column is compared with, never SQL.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from osrdyne.errors import ConfigurationError, OsrdyneError
from osrdyne.protocol.key_patterns import KeyPattern
from osrdyne_worker.pipelines.views.reader_options import refuse_option

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
TELEMETRY = "telemetry"
"""Format of a table of telemetry: its rows are those of the commits that were made before a query."""
LAST_VALUES = "last-values"
"""Format of the database of the last-value reader: its rows are those of its last transaction before a query."""
LIVE = frozenset({TELEMETRY, LAST_VALUES})
"""Formats whose views show the data of the moment at which a query arrives."""
_UNSAFE_IN_PATH = re.compile(r"[\x00-\x1f\x7f/\\*?\[\]{}^~:]")


class UnknownDatasetError(OsrdyneError):
    """No configured dataset matches the key."""


class InvalidKeyPartError(OsrdyneError):
    """A part of the key is not allowed in a path."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class TableSpec(_Model):
    """One view of a dataset, and the source of its rows."""

    view: str = Field(description="Name of the view in queries: letters, digits and _.")
    format: Literal["parquet", "csv", "json", "orc", "delta", "iceberg", "table", "telemetry", "last-values"] = Field(
        "parquet",
        description="How the data is stored; `table`: a table of Spark's catalog, named by `path`; `telemetry`: the "
        "directory of a table of telemetry; `last-values`: the database of `osrdyne last-value`.",
    )
    path: str = Field(min_length=1, description="Location of the data; `{name}` stands for that part of the key.")
    columns: str | None = Field(
        None, description="Schema as DDL (`id bigint, name string`); read from the data if not given."
    )
    unreadable_columns: Literal["refuse", "drop"] = Field(
        "refuse",
        description="For local Parquet. `drop`: the view has no columns whose type Spark cannot read; `refuse`: one of "
        "them makes the view unreadable.",
    )
    options: dict[str, str | bool | int] = Field(default_factory=dict, description="Options of Spark's reader.")
    filters: dict[str, str] = Field(
        default_factory=dict,
        description="Column to value, such as `tenant: '{tenant}'`: the view has only rows equal to it.",
    )
    keys: str | None = Field(
        None,
        description="Keys of devices whose rows are in the view, such as `{site}/%`; `%` at the end matches any text. "
        "For telemetry and last values.",
    )
    pool: str | None = Field(None, description="The pool of the devices. For last values.")
    store: Literal["sqlite", "postgresql"] = Field(
        "sqlite",
        description="For last values. `sqlite`: `path` is the file of the database; `postgresql`: `path` is a file "
        "that contains the URI of the database.",
    )
    cache: bool = Field(
        False, description="Load the view into memory: with `filters` before the first request, otherwise after it."
    )
    key_columns: tuple[str, ...] = Field(
        (), description="Columns by which `/lookup` finds rows; a request gives a value for each of them."
    )

    @field_validator("view")
    @classmethod
    def _valid_view(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("the name of a view has letters, digits and _, and does not start with a digit")
        return value.lower()

    @field_validator("key_columns")
    @classmethod
    def _distinct_key_columns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len({name.lower() for name in value}) != len(value):
            raise ValueError("a column is named twice")
        return value

    @field_validator("keys")
    @classmethod
    def _valid_keys(cls, value: str | None) -> str | None:
        if value is not None and (not value or "%" in value[:-1]):
            raise ValueError("% is allowed at the end only, where it is any further text")
        return value

    @model_validator(mode="after")
    def _live_table(self) -> Self:
        if self.format not in LIVE:
            if self.keys is not None:
                raise ValueError(f"keys are for the formats {TELEMETRY} and {LAST_VALUES}; use filters")
            return self
        if self.keys is None:
            raise ValueError(f'{self.format} needs keys, such as "{{site}}/%"; "%" is every key')
        for name in ("columns", "options", "cache"):
            if getattr(self, name):
                raise ValueError(
                    f"{self.format} has no {name}: its columns are fixed, and each query sees the data of its time"
                )
        if _SCHEME.match(self.path) or set(_PLACEHOLDER.sub("", self.path)) & set("*?[{"):
            kind = "directory" if self.format == TELEMETRY else "file"
            raise ValueError(f"{self.format} needs a {kind} of the local file system, without wildcards")
        return self

    @model_validator(mode="after")
    def _last_values(self) -> Self:
        if self.format == LAST_VALUES:
            if not self.pool:
                raise ValueError(f"{LAST_VALUES} needs pool, the id of the pool whose devices are read")
        elif self.pool is not None or self.store != "sqlite":
            raise ValueError(f"pool and store are for the format {LAST_VALUES}")
        return self

    @model_validator(mode="after")
    def _fixed_table(self) -> Self:
        if self.format == "table" and _PLACEHOLDER.search(self.path):
            raise ValueError("a catalog table has a fixed name; use filters for parts of the key")
        return self

    @model_validator(mode="after")
    def _columns_to_drop(self) -> Self:
        if self.unreadable_columns == "drop":
            scheme = _SCHEME.match(self.path)
            if self.format != "parquet" or (scheme is not None and scheme[0].lower() != "file:"):
                raise ValueError("unreadable_columns: drop is for the format parquet on a local file system")
            if self.columns is not None or set(_PLACEHOLDER.sub("", self.path)) & set("*?[{"):
                raise ValueError("unreadable_columns: drop is for a path without wildcards, and not with columns")
        return self

    @model_validator(mode="after")
    def _known_options(self) -> Self:
        for name in self.options:
            if (why := refuse_option(self.format, name)) is not None:
                raise ValueError(f"options.{name}: {why}")
        return self

    @model_validator(mode="after")
    def _columns_by_name(self) -> Self:
        enforced = {name.lower(): str(value).lower() for name, value in self.options.items()}.get("enforceschema")
        if self.filters and self.format == "csv" and has_header(self.options) and enforced == "true":
            raise ValueError(
                "filters need columns by the names of the header: leave the option enforceSchema out, because with it "
                "Spark reads them by position"
            )
        return self


def has_header(options: Mapping[str, object]) -> bool:
    """Whether the options of a CSV reader say that its files have a header."""
    return any(name.lower() == "header" and str(value).lower() == "true" for name, value in options.items())


class DatasetSpec(_Model):
    """The views of the keys that match one pattern."""

    key: str = Field(description="Pattern of the key, such as `tpch/sf={scale}`.")
    tables: tuple[TableSpec, ...] = Field(min_length=1, description="The views.")
    watch: bool = Field(
        False,
        description="Load the data again when its files change; their latest change is the version of the data.",
    )

    @cached_property
    def pattern(self) -> KeyPattern:
        return KeyPattern(self.key)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = set(self.pattern.names)
        views = [table.view for table in self.tables]
        for view in views:
            if views.count(view) > 1:
                raise ValueError(f"the view {view!r} is defined twice")
        for table in self.tables:
            for template in (table.path, table.keys or "", *table.filters.values()):
                for name in _PLACEHOLDER.findall(template):
                    if name not in names:
                        raise ValueError(f"{table.view}: {{{name}}} is not a part of the key pattern {self.key!r}")
        return self

    @model_validator(mode="after")
    def _watchable(self) -> Self:
        if self.watch and all(table.format in LIVE for table in self.tables):
            raise ValueError("watch is not for telemetry: each query sees the data of its time; leave watch out")
        for table in self.tables if self.watch else ():
            if table.format == "table" or set(_PLACEHOLDER.sub("", table.path)) & set("*?[{"):
                raise ValueError(
                    f"{table.view}: watch needs files at a path without wildcards; leave watch out, and send "
                    "x-data-version with requests that need changed data"
                )
        return self


class PagingConfig(_Model):
    """Results that callers read page by page."""

    directory: str | None = Field(
        None, description="Where results are stored; by default a directory of the user below the temporary one."
    )
    max_bytes: int = Field(2**30, ge=1, description="Size of one result.")
    max_total_bytes: int = Field(4 * 2**30, ge=1, description="Size of all results in the directory.")
    expiry: float = Field(600.0, gt=0, description="Seconds without a request after which a result is removed.")

    @field_validator("directory")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError("the directory must be an absolute path")
        return value


class ExportConfig(_Model):
    """Results that are written to files."""

    directory: str | None = Field(
        None, description="Where exports are written: an absolute path, or a URL that Hadoop knows (`s3a://…`)."
    )
    max_bytes: int = Field(10 * 2**30, ge=1, description="Size of the files of one export.")

    @field_validator("directory")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/") and not _SCHEME.match(value):
            raise ValueError("the directory must be an absolute path or a URL")
        return value


class SqlConfig(_Model):
    """The `app` configuration of the SQL pipeline."""

    datasets: tuple[DatasetSpec, ...] = Field(
        default=(), description="Tried in order; the first whose `key` matches counts."
    )
    base_directory: str | None = Field(
        None, description="Local data must be inside it, symbolic links resolved; relative paths start here."
    )
    row_limit: int = Field(10_000, ge=1, description="Rows of an answer if the request has no `limit`.")
    max_row_limit: int = Field(100_000, ge=1, description="The largest `limit` and `page_size` of a request.")
    paging: PagingConfig = Field(default=PagingConfig(), description="Results that callers read page by page.")
    export: ExportConfig = Field(default=ExportConfig(), description="Results that are written to files.")
    lookup_row_limit: int = Field(100, ge=1, le=10_000, description="Rows of an answer of `/lookup`.")
    max_query_length: int = Field(100_000, ge=1, description="Characters of a query; protects the parsers.")
    max_query_nesting: int = Field(30, ge=1, le=30, description="Brackets within brackets; protects the parsers.")
    max_plan_nodes: int = Field(
        2_000, ge=10, le=100_000, description="Operators of a plan; a common table counts wherever it is used."
    )
    max_expression_nodes: int = Field(
        20_000, ge=10, le=1_000_000, description="Nodes of a plan and its expressions as written."
    )
    max_columns: int = Field(2_000, ge=10, le=100_000, description="Columns of any part of a query.")
    max_constant_bytes: int = Field(
        16 * 2**20, ge=1024, le=2**30, description="Size of a value that a function such as `repeat` produces."
    )
    max_constant_work: int = Field(
        100_000_000, ge=1000, le=10**12, description="Steps to evaluate each expression once (`levenshtein`)."
    )
    max_partitions: int = Field(1_000, ge=1, le=100_000, description="Partitions of `range` and of a hint.")
    max_grouping_sets: int = Field(
        1_024,
        ge=1,
        le=65_536,
        description="Grouping sets of CUBE, ROLLUP and GROUPING SETS; CUBE of n columns has 2^n.",
    )
    max_window_ratio: int = Field(
        2_000, ge=1, le=100_000, description="Length of a `window` divided by its slide: windows of a row."
    )
    max_recursion_level: int = Field(
        1_000, ge=1, le=100_000, description="MAX RECURSION LEVEL of a recursive common table."
    )
    remembered_plan_bytes: int = Field(
        32 * 2**20, ge=0, le=2**30, description="Memory for the plans of remembered queries; 0: none."
    )
    retry_missing_interval: float = Field(
        10.0, ge=0, description="Seconds until a request looks up missing data again."
    )

    coalesce: bool = Field(
        False, description="Answer identical queries that are in the worker at the same time with one run."
    )
    allow_unguarded: bool = Field(
        False, description="Accept a Spark Connect master, where the plans of queries cannot be checked."
    )

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if self.row_limit > self.max_row_limit:
            raise ValueError("row_limit must not be above max_row_limit")
        if self.base_directory is not None and not self.base_directory.startswith("/"):
            raise ValueError("base_directory must be an absolute path")
        return self

    @model_validator(mode="after")
    def _absolute_paths(self) -> Self:
        for dataset in self.datasets:
            for table in dataset.tables:
                anchored = table.path.startswith("/") or _SCHEME.match(table.path)
                if table.format != "table" and not anchored and self.base_directory is None:
                    raise ValueError(f"{table.view}: the path {table.path!r} is relative; set base_directory")
        return self

    @model_validator(mode="after")
    def _inside(self) -> Self:
        """Refuse what each request for the data would be refused for."""
        for dataset in self.datasets:
            for table in dataset.tables:
                local, base = _local_path(table, base=self.base_directory)
                if base is not None and not _is_inside(_PLACEHOLDER.sub("x", local), base):
                    raise ValueError(
                        f"{table.view}: the path {table.path!r} is outside of base_directory {base!r}; give a path "
                        "inside of it, or leave base_directory out"
                    )
        return self


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Keys of devices: `text` alone, or all keys that begin with it."""

    text: str
    is_prefix: bool


@dataclass(frozen=True, slots=True)
class ResolvedTable:
    """One view of one key, with its final `path` and `filters`. A local path must stay in `directory`."""

    spec: TableSpec
    path: str
    filters: tuple[tuple[str, str], ...] = ()
    directory: str | None = None
    keys: KeyRange | None = None


@dataclass(frozen=True, slots=True)
class ResolvedDataset:
    """The views of one key."""

    pattern: str
    tables: tuple[ResolvedTable, ...]
    watch: bool = False


def parse_config(values: Any) -> SqlConfig:
    """Validate the `app` configuration. `ConfigurationError` names every invalid field by its path."""
    try:
        return SqlConfig.model_validate(dict(values))
    except ValidationError as error:
        problems = "; ".join(
            f"worker.config.{'.'.join(str(step) for step in problem['loc'])}: {_reason(problem)}".replace(".:", ":")
            for problem in _without_consequences(error.errors())
        )
        raise ConfigurationError(f"The configuration of the SQL pipeline is invalid: {problems}.") from None


def _without_consequences(problems: list[ErrorDetails]) -> list[ErrorDetails]:
    """The problems, without lists that are too short only because one of their entries is invalid."""
    paths = [problem["loc"] for problem in problems]
    return [
        problem
        for problem in problems
        if problem["type"] != "too_short"
        or not any(len(path) > len(problem["loc"]) and path[: len(problem["loc"])] == problem["loc"] for path in paths)
    ]


def _reason(problem: ErrorDetails) -> str:
    """The text of a problem; for an unknown setting with the name that was probably meant."""
    if problem["type"] != "extra_forbidden":
        return problem["msg"]
    *_, name = problem["loc"]
    near = difflib.get_close_matches(str(name), _sibling_settings(problem["loc"]), n=1)
    return f"unknown setting (did you mean {near[0]}?)" if near else "unknown setting"


def _sibling_settings(path: tuple[int | str, ...]) -> list[str]:
    """The names of the settings that may be in the place of `path`."""
    match [step for step in path if isinstance(step, str)]:
        case ["datasets", _]:
            model: type[BaseModel] = DatasetSpec
        case ["datasets", "tables", _]:
            model = TableSpec
        case ["export", _]:
            model = ExportConfig
        case ["paging", _]:
            model = PagingConfig
        case [_]:
            model = SqlConfig
        case _:
            return []
    return list(model.model_fields)


def resolve(config: SqlConfig, key: str) -> ResolvedDataset:
    """The dataset of `key`. Raises `UnknownDatasetError` or `InvalidKeyPartError`."""
    for dataset in config.datasets:
        parts = dataset.pattern.match(key)
        if parts is not None:
            return ResolvedDataset(
                pattern=dataset.key,
                tables=tuple(_resolve_table(table, parts, base=config.base_directory) for table in dataset.tables),
                watch=dataset.watch,
            )
    raise UnknownDatasetError(
        f"There is no dataset for the key {key!r}; known keys are {_listed(d.key for d in config.datasets)}.", key=key
    )


def _resolve_table(table: TableSpec, parts: dict[str, str], *, base: str | None) -> ResolvedTable:
    if table.format == "table":
        path, directory = table.path, None
    elif table.store == "postgresql" and table.path.startswith("/"):  # the file of the URI is a secret, not data
        path, directory = _resolve_path(table, parts, base=None)
    else:
        path, directory = _resolve_path(table, parts, base=base)
    return ResolvedTable(
        spec=table,
        path=path,
        filters=tuple((column, _fill(value, parts)) for column, value in table.filters.items()),
        directory=directory,
        keys=None if table.keys is None else _resolve_keys(table.keys, parts),
    )


def _resolve_keys(template: str, parts: dict[str, str]) -> KeyRange:
    """The `%` of the configuration is a wildcard; one in a part of the key is a character like any other."""
    return KeyRange(_fill(template.removesuffix("%"), parts), template.endswith("%"))


def _resolve_path(table: TableSpec, parts: dict[str, str], *, base: str | None) -> tuple[str, str | None]:
    """The path and, if it is local, the directory that must contain it: the base, or the path before the first part."""
    for name in _PLACEHOLDER.findall(table.path):
        _check_path_part(name, parts[name])
    template = table.path
    scheme = _SCHEME.match(template)
    if scheme is None and not template.startswith("/"):
        template = f"{base}/{template}"
    for step, filled in ((step, _fill(step, parts)) for step in template.split("/")):
        if step != filled and (filled.startswith((".", "_")) or not filled.strip()):
            raise InvalidKeyPartError(f"The key results in the path component {filled!r}, which is not allowed.")
    if scheme is not None and scheme[0].lower() != "file:":
        return _fill(template, parts), None
    local = template[len(scheme[0]) :] if scheme is not None else template
    first = _PLACEHOLDER.search(local)
    if base is None and first is not None:
        base = local[: first.start()].rpartition("/")[0] or "/"
    return _fill(template, parts), base


def _local_path(table: TableSpec, *, base: str | None) -> tuple[str, str | None]:
    """The path of a table without the scheme of local files, and the base that must contain it, if one must."""
    scheme = _SCHEME.match(table.path)
    is_secret = table.store == "postgresql" and table.path.startswith("/")  # see `_resolve_table`
    if base is None or table.format == "table" or is_secret or (scheme is not None and scheme[0].lower() != "file:"):
        return table.path, None
    local = table.path[len(scheme[0]) :] if scheme is not None else table.path
    return local if local.startswith("/") else f"{base}/{local}", base


def _is_inside(path: str, base: str) -> bool:
    """Whether a path is in a directory, by its text or by the symbolic links of this machine: another one may have the
    data."""
    return any(
        os.path.commonpath([resolved(base), resolved(path)]) == resolved(base)
        for resolved in (_normal, os.path.realpath)
    )


def _normal(path: str) -> str:
    # POSIX lets a path begin with two slashes; those of file:///x are one.
    return os.path.normpath(f"/{path.lstrip('/')}")


def _check_path_part(name: str, value: str) -> None:
    bad = _UNSAFE_IN_PATH.search(value)
    if bad is not None:
        raise InvalidKeyPartError(f"The part {name}={value!r} of the key must not contain {bad[0]!r}: it is a path.")


def _fill(template: str, parts: dict[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: parts[match[1]], template)


def _listed(patterns: Iterable[str]) -> str:
    return ", ".join(repr(pattern) for pattern in patterns) or "none"
