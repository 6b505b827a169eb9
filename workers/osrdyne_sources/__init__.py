"""Data sources for Spark that need neither osrdyne's daemon nor its worker: any PySpark program can read with them.

Register a source with `spark.dataSource.register(RabbitStream)`. PySpark is imported with `RabbitStream` only.
"""

from __future__ import annotations
