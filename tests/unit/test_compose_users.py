"""The users of the RabbitMQ in docker-compose.yml."""

import base64
import hashlib
import json
import os
import runpy
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "deploy" / "config" / "compose_broker_users.py"


def matches(password: str, stored: str) -> bool:
    salted = base64.b64decode(stored)
    return hashlib.sha256(salted[:4] + password.encode()).digest() == salted[4:]


def test_both_users_have_random_passwords_that_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "chown", lambda *_: None)
    program = runpy.run_path(str(PROGRAM))
    monkeypatch.setitem(program["main"].__globals__, "DIRECTORY", tmp_path)
    program["main"]()
    first = {file.name: file.read_text() for file in tmp_path.iterdir()}
    users = {user["name"]: user["password_hash"] for user in json.loads(first["definitions.json"])["users"]}
    assert matches(first["guest-password"], users["guest"])
    assert matches(first["uri"].partition("osrdyne:")[2].partition("@")[0], users["osrdyne"])
    assert not any(matches(name, stored) for name in ("", *users) for stored in users.values())
    program["main"]()
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == first
