"""The driver that runs each worker as a unit of systemd. `driver` implements the interface."""

from osrdyne.drivers.systemd.driver import SystemdDriver as SystemdDriver
