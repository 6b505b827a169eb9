"""Creates the users of the RabbitMQ in docker-compose.yml once: definitions for RabbitMQ, and the passwords.

`osrdyne` is an administrator, whose password only the daemon can read. `guest` is a client: it may send requests, read
streamed answers, query the progress of starts and cancel requests, and nothing else. Both passwords are random: workers
can reach the broker, and must not be able to send requests to other keys.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
from pathlib import Path

DIRECTORY = Path("/broker")
DAEMON_USER_ID = 10001


def password_hash(password: str) -> str:
    """The hash in RabbitMQ's format: a salt of four bytes, and the SHA-256 of salt and password."""
    salt = os.urandom(4)
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


def user(name: str, password: str, *tags: str) -> dict[str, object]:
    algorithm = "rabbit_password_hashing_sha256"
    return {
        "name": name,
        "password_hash": password_hash(password),
        "hashing_algorithm": algorithm,
        "tags": list(tags),
        "limits": {},
    }


def permissions(name: str, *, configure: str, write: str, read: str) -> dict[str, str]:
    return {"user": name, "vhost": "/", "configure": configure, "write": write, "read": read}


def main() -> None:
    definitions, uri = DIRECTORY / "definitions.json", DIRECTORY / "uri"
    if definitions.exists():
        return
    # Safe in a URI without an encoding.
    password, guest_password = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    (DIRECTORY / "guest-password").write_text(guest_password, encoding="utf-8")
    uri.touch(mode=0o400)
    uri.write_text(f"amqp://osrdyne:{password}@rabbitmq:5672/", encoding="utf-8")
    os.chown(uri, DAEMON_USER_ID, DAEMON_USER_ID)
    content = {
        "vhosts": [{"name": "/"}],
        "users": [user("osrdyne", password, "administrator"), user("guest", guest_password)],
        "permissions": [
            permissions("osrdyne", configure=".*", write=".*", read=".*"),
            permissions("guest", configure="^$", write="^osrdyne-(req|cancel|progress|credit)-xchg$", read="^$"),
        ],
    }
    new = definitions.with_suffix(".new")
    new.write_text(json.dumps(content), encoding="utf-8")
    new.chmod(0o444)  # hashes, for RabbitMQ's own user
    new.replace(definitions)


if __name__ == "__main__":
    main()
