"""The broker's URI as a file in a worker's container.

The driver writes it through the engine before the container starts. So daemon and engine need no shared directory, the
daemon may run in a container, the engine may be remote, and the URI is neither in the environment nor in
`docker inspect`. The worker removes the file once it has read it. Used by the Docker driver.
"""

from __future__ import annotations

import io
import tarfile
from typing import Any

from docker.errors import NotFound

from osrdyne.drivers.docker.engine import Engine
from osrdyne.errors import DriverUnavailableError

URI_FILE = "/run/osrdyne/amqp-uri"

_PASSWD = "/etc/passwd"
_MAX_PASSWD_BYTES = 2**20


def secret_archive(uri: str, *, owner: int) -> bytes:
    """A tar archive for the root directory with the file, which only its owner may read and remove."""
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
    """The user id of the container's process: that of the option or image. A name is looked up in the container's
    `/etc/passwd`."""
    inspected = engine.call(lambda client: client.inspect_container(container_id))
    user = str(inspected["Config"].get("User") or "0").partition(":")[0]
    if user.isdigit():
        return int(user)
    return user_id(user, _read_passwd(engine, container_id))


def user_id(name: str, passwd: str) -> int:
    """The id of a user in the text of a passwd file; 0 if the file does not have it, because the start then fails."""
    for line in passwd.splitlines():
        fields = line.split(":")
        if fields[0] == name and len(fields) > 2 and fields[2].isdigit():
            return int(fields[2])
    return 0


def _read_passwd(engine: Engine, container_id: str) -> str:
    """The text of `/etc/passwd`, which may be a link (images made by Nix); empty if it does not exist."""

    def read(client: Any) -> bytes:
        chunks, entry = client.get_archive(container_id, _PASSWD)
        if entry and entry.get("linkTarget"):
            chunks, _ = client.get_archive(container_id, entry["linkTarget"])
        return b"".join(chunks)

    try:
        archive = engine.call(read)
    except NotFound:
        return ""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            member = files.next()
            content = None if member is None else files.extractfile(member)
            return "" if content is None else content.read(_MAX_PASSWD_BYTES).decode("utf-8", errors="replace")
    except tarfile.TarError as error:
        raise DriverUnavailableError(f"The engine sent a damaged copy of {_PASSWD}: {error}.") from error
