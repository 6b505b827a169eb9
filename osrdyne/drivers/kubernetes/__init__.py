"""The driver that runs each group as a Deployment. `driver` implements the interface."""

from osrdyne.drivers.kubernetes.driver import KubernetesDriver as KubernetesDriver
