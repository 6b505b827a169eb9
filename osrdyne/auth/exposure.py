"""Where an API may listen: on loopback without configuration, elsewhere only with tokens and names."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from osrdyne.errors import ConfigurationError


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own host only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(
    host: str, *, tokens_file: str | None, insecure: bool, allowed_hosts: Sequence[str], tls: bool
) -> list[str]:
    """Warnings for the log. Raises `ConfigurationError` where the API would be open to the network."""
    if is_loopback(host):
        return []
    if tokens_file is None and not insecure:
        raise ConfigurationError(
            f"api.host: other hosts can reach {host or 'every address'}, and the API has no tokens. Create one with "
            "`osrdyne token create NAME --role operate --file FILE` and set api.tokens_file, listen on 127.0.0.1, or "
            "set api.insecure to true."
        )
    if not allowed_hosts:
        raise ConfigurationError(
            f"api.allowed_hosts: required where api.host is not loopback ({host or 'every address'}). List the names "
            "and addresses under which clients reach the API."
        )
    warnings = []
    if tokens_file is None:
        warnings.append("api.insecure is true: every host that reaches the API can use all of it without a token")
    elif not tls:
        warnings.append(
            "the API has no TLS (api.tls), so tokens cross the network unencrypted unless a proxy encrypts them"
        )
    return warnings
