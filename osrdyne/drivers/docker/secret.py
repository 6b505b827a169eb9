"""The broker's URI as a file in a worker's container.

It is written into the container before its start, through the engine: so it needs no directory that daemon and engine
share, works when the daemon runs in a container itself and with an engine elsewhere, and is neither in the environment
nor in `docker inspect`. The worker removes it once it has read it. Used by the Docker driver.
"""

from __future__ import annotations

import io
import tarfile
from typing import Any

from docker.errors import NotFound

from osrdyne.drivers.docker.engine import Engine

URI_FILE = "/run/osrdyne/amqp-uri"

_PASSWD = "/etc/passwd"
_MAX_PASSWD_BYTES = 2**20


def secret_archive(uri: str, *, owner: int) -> bytes:
    """A tar archive, for the root directory, of the file that only its owner may read, and remove."""
    content = uri.encode()
    directory = tarfile.TarInfo("run/osrdyne")
    directory.type, directory.mode, directory.uid = tarfile.DIRTYPE, 0o700, owner
    file = tarfile.TarInfo(URI_FILE.removeprefix("/"))
    file.size, file.mode, file.uid = len(content), 0o400, owner
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(directory)
        archive.addfile(file, io.BytesIO(content))
    return buffer.getvalue()


def owner_of(engine: Engine, container_id: str) -> int:
    """The user id that the container's process will have: the option's or the image's user, by the container's own
    list of users where it is a name."""
    inspected = engine.call(lambda client: client.inspect_container(container_id))
    user = str(inspected["Config"].get("User") or "0").partition(":")[0]
    if user.isdigit():
        return int(user)
    return user_id(user, _read_passwd(engine, container_id))


def user_id(name: str, passwd: str) -> int:
    """The id of a user in the text of a passwd file; 0 when it is not there: the engine then refuses the start."""
    for line in passwd.splitlines():
        fields = line.split(":")
        if fields[0] == name and len(fields) > 2 and fields[2].isdigit():
            return int(fields[2])
    return 0


def _read_passwd(engine: Engine, container_id: str) -> str:
    """The text of the list of users, also where it is a link, as images made by Nix have it; empty without one."""

    def read(client: Any) -> bytes:
        chunks, entry = client.get_archive(container_id, _PASSWD)
        if entry and entry.get("linkTarget"):
            chunks, _ = client.get_archive(container_id, entry["linkTarget"])
        return b"".join(chunks)

    try:
        archive = engine.call(read)
    except NotFound:
        return ""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        member = files.next()
        content = None if member is None else files.extractfile(member)
        return "" if content is None else content.read(_MAX_PASSWD_BYTES).decode("utf-8", errors="replace")
