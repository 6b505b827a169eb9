"""osrdyne: keyed PySpark workers behind AMQP RPC."""

from __future__ import annotations

__version__ = "0.1.0"
