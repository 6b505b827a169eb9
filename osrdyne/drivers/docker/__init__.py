"""The driver that runs each worker in a container. `driver` is its face; the other modules are its parts."""

from osrdyne.drivers.docker.driver import DockerDriver as DockerDriver
