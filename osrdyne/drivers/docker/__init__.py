"""The driver that runs each worker in a container. `driver` implements the interface."""

from osrdyne.drivers.docker.driver import DockerDriver as DockerDriver
