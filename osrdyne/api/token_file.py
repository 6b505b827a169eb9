"""The file that holds the digests of API tokens: read by the daemon, changed by `osrdyne token`."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from osrdyne.auth.decision import check_exposure
from osrdyne.auth.tokens import Token, parse_tokens, render_tokens
from osrdyne.config.models import ApiSettings
from osrdyne.errors import ConfigurationError
from osrdyne.logs import Logger, get_logger

MAX_BYTES = 2**20

Change = Callable[[tuple[Token, ...]], tuple[Token, ...]]


class TokenFile:
    """One file. Reading it again costs a `stat` as long as it does not change."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._tokens: tuple[Token, ...] = ()
        self._read_at: tuple[int, ...] | None = None
        self._failure: str | None = None
        self._log: Logger = get_logger("api", tokens_file=path)

    def read(self) -> tuple[Token, ...]:
        """The tokens of the file. Raises `ConfigurationError`."""
        try:
            with self._path.open("rb") as file:
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

    def current(self) -> tuple[Token, ...]:
        """The tokens now. A file that cannot be read has none: every token is refused until it is repaired."""
        try:
            status = self._path.stat()
            version: tuple[int, ...] | None = (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)
        except OSError:
            version = None
        if version is None or version != self._read_at:
            try:
                self._tokens, failure = self.read(), None
            except ConfigurationError as error:
                self._tokens, failure = (), str(error)
            if failure is not None and failure != self._failure:
                self._log.error("token file unusable, all API tokens are refused", error=failure)
            self._read_at, self._failure = version, failure
        return self._tokens

    def change(self, change: Change) -> None:
        """Replace the tokens by what `change` makes of them; one process at a time. Raises `ConfigurationError`."""
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
        """Write a new file and rename it, so that a reader sees one version or the other. Owner and mode stay."""
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


def tokens_of(settings: ApiSettings) -> tuple[TokenFile | None, list[str]]:
    """The file of API tokens, None where everyone who reaches the API may use it; and warnings for the log.

    Raises `ConfigurationError` where the API would be open to the network, or the token file cannot be used.
    """
    warnings = check_exposure(
        settings.host,
        tokens_file=settings.tokens_file,
        insecure=settings.insecure,
        allowed_hosts=settings.allowed_hosts,
        tls=settings.tls.certificate_file is not None,
    )
    if settings.tokens_file is None:
        return None, warnings
    tokens = TokenFile(settings.tokens_file)
    if not tokens.read():
        warnings.append("the file of API tokens has no token, so every request but /health and /ready is refused")
    return tokens, warnings
