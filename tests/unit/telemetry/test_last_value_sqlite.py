"""Errors of SQLite name the file and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from osrdyne.errors import LastValueStoreError
from osrdyne.telemetry.last_values.sqlite import SqliteStore
from osrdyne.telemetry.last_values.values import Changes, LastValue


@pytest.mark.proves("last-values/database-last-values-locked")
def test_full_disk_and_other_errors_name_the_remedy(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "v.db", pool="p", create=True)
    store.positions()
    [pages] = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    large = LastValue("k", "s", 0, None, "telemetry", None, "x" * 100_000, None, None, 0, 0, 0, 0, None)
    with pytest.raises(LastValueStoreError, match=r"v\.db: the disk is full"):
        store.write([Changes(0, 1, [large])])
    assert store.positions() == {}
    store.close()
    for file in tmp_path.iterdir():
        file.write_bytes(b"no database at all" * 999)
    with pytest.raises(LastValueStoreError, match=r"v\.db"):
        store.positions()
    with pytest.raises(LastValueStoreError, match=r"Set telemetry\.last_values\.file"):
        SqliteStore(tmp_path / "v.db" / "below", pool="p", create=True).positions()
