"""Names and texts of the systemd driver: unit names, environment files, and how a unit ended. Pure.

Source: systemd.unit(5), systemd.exec(5), systemd-escape(1). An instance name has no backslash, so that `%i`
can stand in `EnvironmentFile=`, which reads its value as a glob pattern (decision 0013).
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from osrdyne.drivers.base import Exit
from osrdyne.drivers.shared import signal_name
from osrdyne.protocol.names import Key, decode_key, fit_key

_UNIT_NAME_LIMIT = 190  # systemd allows 255, but derives longer file names from it: by 57 for `PrivateTmp=`.
_ESCAPED_IN_QUOTES = str.maketrans({character: f"\\{character}" for character in '\\"`$'})
_CLD_EXITED = 1
_FIRST_OWN_CODE = 200
_OWN_CODES = {
    200: "CHDIR", 203: "EXEC", 209: "STDOUT", 214: "SETSCHEDULER", 216: "GROUP", 217: "USER", 218: "CAPABILITIES",
    219: "CGROUP", 226: "NAMESPACE", 228: "SECCOMP", 233: "RUNTIME_DIRECTORY", 238: "STATE_DIRECTORY",
    243: "CREDENTIALS",
}  # fmt: skip
_REASONS = {
    "oom-kill": "out of memory",
    "timeout": "it did not stop within TimeoutStopSec",
    "watchdog": "its watchdog ran out",
    "core-dump": "core dumped",
}


@dataclass(frozen=True, slots=True)
class UnitNames:
    """The units of one pool of one stack: `TEMPLATE@POOL-STACK-SLOT-KEY.service`.

    The key comes last, because only its part may contain other characters than lower-case letters, digits and `_`.
    """

    template: str
    pool: str
    stack: str

    @property
    def prefix(self) -> str:
        """The beginning of all instance names of this pool."""
        return f"{self.pool}-{hashlib.sha256(self.stack.encode()).hexdigest()[:8]}-"

    @property
    def pattern(self) -> str:
        """A glob pattern that matches the units of this pool and no others."""
        return self.unit(f"{self.prefix}*")

    def unit(self, instance: str) -> str:
        return f"{self.template}@{instance}.service"

    def instance(self, key: Key, slot: int) -> str:
        """The instance name of a slot: readable, unique for each key, and not too long for systemd."""
        start = f"{self.prefix}{slot}-"
        return start + fit_key(key, _UNIT_NAME_LIMIT - len(self.unit(start))).replace("+", ":")

    def instance_of(self, unit: str) -> str:
        return unit.removeprefix(f"{self.template}@").removesuffix(".service")

    def parse(self, instance: str) -> tuple[Key, int] | None:
        """Key and slot of an instance name; None if it belongs to another pool, or its key was shortened."""
        slot, _, encoded = instance.removeprefix(self.prefix).partition("-")
        key = decode_key(encoded.replace(":", "+"))
        if not instance.startswith(self.prefix) or not slot.isdigit() or key is None:
            return None
        return key, int(slot)


def object_path(unit: str) -> str:
    """The D-Bus object path of a unit: its name with everything but letters and digits as `_hh`."""
    label = "".join(chr(byte) if chr(byte).isalnum() and byte < 128 else f"_{byte:02x}" for byte in unit.encode())
    return f"/org/freedesktop/systemd1/unit/{label}"


def is_accepted(value: str) -> bool:
    """Whether systemd accepts the value of a variable: UTF-8 without NUL and without Unicode's noncharacters."""
    return not any(
        character == "\0"
        or 0xD800 <= ord(character) <= 0xDFFF
        or 0xFDD0 <= ord(character) <= 0xFDEF
        or ord(character) & 0xFFFE == 0xFFFE
        for character in value
    )


def environment_text(variables: Mapping[str, str]) -> str:
    """Variables in the syntax of `EnvironmentFile=`; line breaks in quotes are not escaped."""
    return "".join(f'{name}="{value.translate(_ESCAPED_IN_QUOTES)}"\n' for name, value in variables.items())


@dataclass(frozen=True, slots=True)
class UnitEnd:
    """How a unit ended: `ExecMainCode`, `ExecMainStatus` and `Result` of systemd."""

    code: int
    status: int
    result: str

    @property
    def not_started(self) -> str | None:
        """Why systemd could not run the program, in its own terms; None if the program ran."""
        if self.code == _CLD_EXITED and self.status >= _FIRST_OWN_CODE and self.result == "exit-code":
            return f"{self.status}/{_OWN_CODES.get(self.status, 'see systemd.exec(5)')}"
        return self.result if self.code == 0 and self.result != "success" else None

    def to_exit(self) -> Exit:
        """Translate to the `Exit` of all drivers."""
        if self.not_started is not None:
            return Exit(reason=f"systemd could not run it: {self.not_started}")
        reason = _REASONS.get(self.result)
        if self.code == _CLD_EXITED or self.code == 0:
            return Exit(code=self.status, reason=reason)
        if self.status == signal.SIGKILL and self.result == "signal":
            reason = "killed from outside, or the host ran out of memory"
        return Exit(signal=signal_name(self.status), reason=reason)
