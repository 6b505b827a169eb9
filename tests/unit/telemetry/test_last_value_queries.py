"""Queries of last values do not delay the event loop."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from osrdyne.config.models import Settings
from osrdyne.errors import ConfigurationError
from osrdyne.telemetry.last_values import query


async def test_driver_of_the_database_is_not_imported_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    opened_by = []

    def open_store(settings: Settings, *, create: bool) -> NoReturn:
        opened_by.append(threading.current_thread())
        raise ConfigurationError("no driver")

    monkeypatch.setattr(query, "open_store", open_store)
    settings = Settings.model_validate({"pool": {"id": "p", "kind": "managed"}, "telemetry": {"name": "sensors"}})
    values = query.LastValues(settings)
    for asked in (values.totals(), values.page("k", series=None, after=None, limit=1)):
        with pytest.raises(ConfigurationError):
            await asked
    assert len(opened_by) == 2
    assert threading.main_thread() not in opened_by
