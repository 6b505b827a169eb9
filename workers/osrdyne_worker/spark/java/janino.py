"""Compiles the `.java` files of this package in the JVM of the session, with Janino, a compiler that is part of Spark.

Python reaches the JVM through py4j, one call for each method of an object. Code that visits many objects, or extends a
class of Spark, is therefore written in Java; compiled here, it needs no jar for each version of Spark.
"""

from __future__ import annotations

from importlib.resources.abc import Traversable
from typing import Any


def compiled_class(gateway: Any, source: Traversable) -> Any:
    """The class of a source file, compiled in the JVM of `gateway`. The file has the name of the class."""
    compiler = gateway.jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(gateway.jvm.Thread.currentThread().getContextClassLoader())
    compiler.cook(source.read_text(encoding="utf-8"))
    return compiler.getClassLoader().loadClass(source.name.removesuffix(".java"))


def compiled_method(gateway: Any, source: Traversable, name: str) -> Any:
    """A public method of the class of a source file; there must be one with this name."""
    return next(method for method in compiled_class(gateway, source).getMethods() if method.getName() == name)
