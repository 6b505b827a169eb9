"""`osrdyne spark`: what the program of the worker gets."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from osrdyne.cli.daemon import spark
from osrdyne.protocol.environment import read_key
from osrdyne.testing.keys import ODD_KEYS


@pytest.mark.parametrize("key", ODD_KEYS.values(), ids=ODD_KEYS.keys())
def test_any_key_reaches_the_program_that_infers_columns(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    started: list[tuple[Any, dict[str, str]]] = []

    def start(command: Any, *, env: dict[str, str], **_: object) -> subprocess.Popen[str]:
        started.append((command, env))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        spark.infer_columns(key, None, None)
    [(command, variables)] = started
    assert read_key(variables) == key
    # No variable and no argument of a process can hold NUL.
    assert not any("\0" in text for text in (*command, *variables.values()))
