"""The driver that runs each group as a Deployment. `driver` is its face; the other modules are its parts."""

from osrdyne.drivers.kubernetes.driver import KubernetesDriver as KubernetesDriver
