"""Map the claims of a verified JWT to a principal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from osrdyne.auth.grants import ALL_KEYS, Grant, KeyScope, Method, Principal, Role, parse_scope

MAX_NAME = 200
"""Characters of the name of a principal."""

ACTIONS: Mapping[str, tuple[Grant, ...]] = {
    "Send": (Grant.SEND,),
    "Listen": (Grant.LISTEN,),
    "Manage": Role.ADMIN.grants,
}
"""The claims of single rights: true for all keys, or a pattern of keys."""


def is_name(text: object) -> bool:
    """Whether a text can name a principal in logs."""
    return isinstance(text, str) and 0 < len(text) <= MAX_NAME and text.isprintable()


def grants_of_values(values: Iterable[object], roles: Mapping[str, str]) -> dict[Grant, KeyScope]:
    """The grants for all keys that `roles` assigns to these values. `roles`: the name of a role or grant, by value.

    Values that `roles` does not contain are ignored.
    """
    found: dict[Grant, KeyScope] = {}
    for value in values:
        given = roles.get(value) if isinstance(value, str) else None
        if given is not None:
            grants = Role(given).grants if given in list(Role) else (Grant(given),)
            found.update(dict.fromkeys(grants, ALL_KEYS))
    return found


def principal_of_claims(claims: Mapping[str, object], *, role_claim: str, roles: Mapping[str, str]) -> Principal | None:
    """The principal of a token; None if a claim is invalid.

    A claim with a pattern adds a grant for some keys. It never narrows a grant that a role gives for all keys.
    """
    name = claims.get("sub")
    if not isinstance(name, str) or not is_name(name):
        return None
    value = claims.get(role_claim)
    grants = grants_of_values(value if isinstance(value, list) else [value], roles)
    for action, given in ACTIONS.items():
        value = claims.get(action, False)
        if value is False:
            continue
        if value is not True and not isinstance(value, str):
            return None
        try:
            scope = parse_scope(value if isinstance(value, str) else None)
        except ValueError:
            return None
        for grant in given:
            if grants.get(grant) != ALL_KEYS:
                grants[grant] = scope
    return Principal(name, grants, Method.JWT)
