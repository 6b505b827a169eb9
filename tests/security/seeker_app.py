"""A worker whose handler searches every place for the AMQP URI that code in a worker can read without a debugger."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from osrdyne_worker import App, Call

app = App()
AT_IMPORT = dict(os.environ)


@app.handler("/seek")
def seek(call: Call) -> list[str]:
    """The names of the places that hold the text of the request's body."""
    wanted = call.body
    return sorted({name for name, content in _places() if wanted in content})


@app.handler("/who")
def who(call: Call) -> int:
    return os.getpid()


def _places() -> Iterator[tuple[str, bytes]]:
    yield "os.environ at import", repr(AT_IMPORT).encode()
    yield "os.environ", repr(dict(os.environ)).encode()
    yield "environment of a child", subprocess.run(["/usr/bin/env"], capture_output=True, check=True).stdout
    for pid in (os.getpid(), os.getppid()):
        for name in ("environ", "cmdline"):
            yield f"/proc/{pid}/{name}", _content(Path(f"/proc/{pid}/{name}"))
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.is_file() and not str(descriptor.resolve()).endswith(".log"):
            yield f"descriptor {descriptor.name}", _content(descriptor)
    for path in Path(AT_IMPORT.get("OSRDYNE_STATE_DIRECTORY", "/nowhere")).rglob("*"):
        if path.is_file() and path.suffix != ".log":
            yield str(path), _content(path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
