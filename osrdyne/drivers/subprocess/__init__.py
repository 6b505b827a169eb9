"""The driver that runs each worker as a process of this host. `driver` is its face; the other modules are its parts."""

from osrdyne.drivers.subprocess.driver import SubprocessDriver as SubprocessDriver
