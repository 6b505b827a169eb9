"""Values for the parameters of a query (`:name`, `?`) as literals of Spark. Used by pipelines.

Spark's parser replaces the parameters by the literals: the plan equals that of the query with the values written out,
and every check of a plan sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A value and its type in Spark SQL. Decimals, dates and timestamps are text in ISO 8601, timestamps in UTC."""

    kind: str
    value: str | bytes | bool | int | float | None


Parameters = Mapping[str, Parameter] | tuple[Parameter, ...]
"""By name, or by position."""


class ParametersNotSupportedError(Exception):
    """This version of PySpark cannot replace parameters by literals."""


def parse_with_parameters(session: Any, parser: Any, query: str, parameters: Parameters) -> Any:
    """The parsed plan of the query with the values of its parameters. Raises the error of Spark's parser."""
    jvm = session._jvm
    try:
        contexts, convert = jvm.org.apache.spark.sql.catalyst.parser, jvm.org.apache.spark.api.python.PythonUtils
        if isinstance(parameters, Mapping):
            named = jvm.java.util.HashMap()
            for name, parameter in parameters.items():
                named.put(name, _literal(jvm, parameter))
            context = contexts.NamedParameterContext(convert.toScalaMap(named))
        else:
            listed = jvm.java.util.ArrayList()
            for parameter in parameters:
                listed.add(_literal(jvm, parameter))
            context = contexts.PositionalParameterContext(convert.toSeq(listed))
        parse = parser.parsePlanWithParameters
        return parse(query, context)
    except Py4JNetworkError:
        raise
    except (Py4JError, TypeError) as error:
        if type(error) not in (Py4JError, TypeError):
            raise  # an error of the parser itself
        raise ParametersNotSupportedError(str(error)) from error


_JAVA_VALUES: Mapping[str, Callable[[Any, Any], Any]] = {
    "decimal": lambda jvm, text: jvm.java.math.BigDecimal(text),
    "date": lambda jvm, text: jvm.java.time.LocalDate.parse(text),
    "timestamp": lambda jvm, text: jvm.java.time.Instant.parse(text),
    "timestamp_ntz": lambda jvm, text: jvm.java.time.LocalDateTime.parse(text),
    "binary": lambda jvm, value: bytearray(value),
}


def _literal(jvm: Any, parameter: Parameter) -> Any:
    companion = getattr(getattr(jvm.org.apache.spark.sql.catalyst.expressions, "Literal$"), "MODULE$")
    convert = _JAVA_VALUES.get(parameter.kind)
    return companion.apply(parameter.value if convert is None else convert(jvm, parameter.value))
