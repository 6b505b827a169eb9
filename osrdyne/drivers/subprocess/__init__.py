"""The driver that runs each worker as a process of this host. `driver` implements the interface."""

from osrdyne.drivers.subprocess.driver import SubprocessDriver as SubprocessDriver
