"""The condition language of routes. Source: docs/reference/routes/conditions.md; Azure IoT Edge routes."""

from osrdyne.ingress.conditions.compiler import Condition, compile_condition, reader_of
from osrdyne.ingress.conditions.samples import Sample
from osrdyne.ingress.conditions.values import UNDEFINED, Undefined

__all__ = ["UNDEFINED", "Condition", "Sample", "Undefined", "compile_condition", "reader_of"]
