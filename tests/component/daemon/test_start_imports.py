"""What the daemon loads before it leads: each library that it need not have then delays the first request."""

import subprocess
import sys

LATER = {"fastapi", "starlette", "uvicorn", "docker", "lightkube", "dbus_fast", "psutil", "osrdyne.client"}
"""Libraries of the HTTP API and of drivers that are not the configured one, and our own client."""


def test_daemon_starts_without_the_libraries_of_its_api_of_drivers_and_of_clients():
    script = f"import sys, osrdyne.cli.daemon.run, osrdyne.daemon.daemon; print(sorted({LATER} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
