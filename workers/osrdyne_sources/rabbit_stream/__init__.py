"""The data source `rabbitmq-stream`: `from osrdyne_sources.rabbit_stream import RabbitStream`.

Reference: docs/reference/rabbitmq-stream-source.md.
"""

from __future__ import annotations

from osrdyne_sources.rabbit_stream.source import RabbitStream as RabbitStream
