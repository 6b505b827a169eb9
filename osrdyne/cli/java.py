"""Whether the Java that Spark needs is here. Asked by `doctor`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from osrdyne.config.models import Settings
from osrdyne.findings import Finding

LEAST_VERSION = 17
_REMEDY = "Install Java 17 or later (Debian: apt install default-jre-headless), or set JAVA_HOME."
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


def check_java(settings: Settings, *, environment: Mapping[str, str] | None = None) -> Finding:
    """Spark's Java on this host. Fatal only where workers of this host run Spark themselves."""
    fatal = settings.driver.name == "subprocess" and not settings.worker.spark_master.startswith("sc://")
    program = _find(os.environ if environment is None else environment)
    if program is None:
        return Finding("java", ok=False, message="No Java was found.", remedy=_REMEDY, fatal=fatal)
    try:
        done = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Finding("java", ok=False, message=f"{program} does not run.", remedy=_REMEDY, fatal=fatal)
    version = _VERSION.search(done.stderr + done.stdout)
    if version is None or int(version[1]) < LEAST_VERSION:
        found = f"version {version[1]}" if version else "of an unknown version"
        return Finding("java", ok=False, message=f"{program} is {found}.", remedy=_REMEDY, fatal=fatal)
    return Finding("java", ok=True, message=f"{program} is version {version[1]}.")


def _find(environment: Mapping[str, str]) -> str | None:
    """As Spark looks: `JAVA_HOME`, then `PATH`."""
    home = environment.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else shutil.which("java", path=environment.get("PATH"))
