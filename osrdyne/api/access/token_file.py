"""The file with the digests of API tokens: read by the daemon, changed by `osrdyne token`."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from osrdyne.auth.decision import check_exposure
from osrdyne.auth.tokens import Token, parse_tokens, render_tokens
from osrdyne.config.models import ApiSettings
from osrdyne.errors import ConfigurationError
from osrdyne.logs import Logger, get_logger

MAX_BYTES = 2**20
MAX_CHANGES = 100  # Changes that wait for their record.

Change = Callable[[tuple[Token, ...]], tuple[Token, ...]]


@dataclass(frozen=True, slots=True)
class TokenChange:
    """A change of the file that the daemon has detected: SHA-256 of the tokens before and after it, and their names."""

    before: str
    after: str
    detail: str


class TokenFile:
    """One token file. While it does not change, its tokens cost one `stat`."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._tokens: tuple[Token, ...] = ()
        self._version_read: tuple[int, ...] | None = None
        self._was_read = False
        self._failure: str | None = None
        self._changes: deque[TokenChange] = deque(maxlen=MAX_CHANGES)
        self._reading = asyncio.Lock()
        self._log: Logger = get_logger("api", tokens_file=path)

    def read(self) -> tuple[Token, ...]:
        """The tokens of the file. Raises `ConfigurationError`."""
        try:
            with open(self._path, "rb", opener=_open_without_waiting) as file:
                status = os.fstat(file.fileno())
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ConfigurationError(f"{self._path}: cannot read the API tokens: {error.strerror}.") from error
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(f"{self._path}: the file of API tokens must be a regular file.")
        if status.st_mode & stat.S_IWOTH:
            raise ConfigurationError(f"{self._path}: every user can write to the file of API tokens. Run chmod o-w.")
        if len(content) > MAX_BYTES:
            raise ConfigurationError(f"{self._path}: the file of API tokens is larger than {MAX_BYTES} bytes.")
        return parse_tokens(content.decode("utf-8", "replace"), str(self._path))

    async def current(self) -> tuple[Token, ...]:
        """The current tokens. A file that cannot be read has none: every token is refused until it is repaired.

        A changed file is read in a thread, because a large one takes a second. Requests wait for it, so that none is
        checked by the former tokens.
        """
        if self._is_unchanged():
            return self._tokens
        async with self._reading:
            if not self._is_unchanged():
                version, tokens, failure = await asyncio.to_thread(self._read_again)
                if failure is not None and failure != self._failure:
                    self._log.error("token file unusable, all API tokens are refused", error=failure)
                # Not by the version, which is None for a file that was missing: its return is a change as well.
                if self._was_read and self._tokens != tokens:
                    self._changes.append(_change(self._tokens, tokens))
                self._was_read = True
                self._tokens, self._version_read, self._failure = tokens, version, failure
            return self._tokens

    def current_if_unchanged(self) -> tuple[Token, ...] | None:
        """The current tokens; None if the file must be read first."""
        return self._tokens if self._is_unchanged() else None

    def _is_unchanged(self) -> bool:
        return self._version_read is not None and self._version() == self._version_read

    def _version(self) -> tuple[int, ...] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode

    def _read_again(self) -> tuple[tuple[int, ...] | None, tuple[Token, ...], str | None]:
        """The version of the file, its tokens, and the error if it cannot be read."""
        version = self._version()  # before the content: a change in between is read next time
        try:
            return version, self.read(), None
        except ConfigurationError as error:
            return version, (), str(error)

    def take_changes(self) -> list[TokenChange]:
        """The changes of the tokens that `current` has found since the last call."""
        found = list(self._changes)
        self._changes.clear()
        return found

    def change(self, change: Change) -> None:
        """Replace the tokens by the result of `change`; one process at a time. Raises `ConfigurationError`."""
        try:
            with self._locked():
                before = self.read() if self._path.exists() else ()
                self._replace(render_tokens(change(before)))
        except OSError as error:
            raise ConfigurationError(f"{self._path}: cannot write the API tokens: {error.strerror}.") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._path.with_name(f"{self._path.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _replace(self, text: str) -> None:
        """Replace the file atomically. Its owner and mode stay."""
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                with suppress(FileNotFoundError):
                    before = self._path.stat()
                    os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
                    with suppress(PermissionError):
                        os.fchown(file.fileno(), before.st_uid, before.st_gid)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(self._path)
        finally:
            unfinished.unlink(missing_ok=True)


def _open_without_waiting(path: str, flags: int) -> int:
    """An opener that does not wait for the writer of a named pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _change(before: tuple[Token, ...], after: tuple[Token, ...]) -> TokenChange:
    groups = (
        ("added", {token.name for token in after} - {token.name for token in before}),
        ("removed", {token.name for token in before} - {token.name for token in after}),
    )
    detail = "; ".join(f"{what} {', '.join(sorted(names))}" for what, names in groups if names)
    return TokenChange(_digest(before), _digest(after), detail or "changed")


def _digest(tokens: tuple[Token, ...]) -> str:
    return hashlib.sha256(render_tokens(tokens).encode()).hexdigest()


def tokens_of(settings: ApiSettings) -> tuple[TokenFile | None, list[str]]:
    """The file of API tokens, if the settings name one, and warnings for the log.

    Raises `ConfigurationError` if the API would be open to the network, or the token file cannot be used.
    """
    warnings = check_exposure(
        settings.host,
        identifies=settings.identifies,
        allow_anonymous=settings.allow_anonymous,
        allowed_hosts=settings.allowed_hosts,
        tls=settings.tls.certificate_file is not None,
    )
    if settings.tokens_file is None:
        return None, warnings
    tokens = TokenFile(settings.tokens_file)
    if not tokens.read():
        warnings.append("the file of API tokens has no token, so every request but /health and /ready is refused")
    return tokens, warnings
