"""The driver that runs each worker as a unit of systemd. `driver` is its face; the other modules are its parts."""

from osrdyne.drivers.systemd.driver import SystemdDriver as SystemdDriver
