"""The document of profiles, checked as a whole: `{"profiles": [{"match": "tpch/{scale}", "memory": "2GiB"}]}`.

`load_profiles` reads the text of a user, and `ProfileManifest.document` gives the form that is stored, which loads to
the same profiles. One error refuses the whole document, and every error is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from osrdyne.config.loading import problems_of
from osrdyne.config.profiles import MAX_PROFILES, Profile
from osrdyne.ingress.documents.problems import Problem
from osrdyne.ingress.documents.reader import DocumentReader, Members, read_document, read_json
from osrdyne.logs import mask_uri

_PROFILES = "profiles"
# What Spark hides in its own pages (`spark.redaction.regex`), and the keys of Azure: `fs.azure.account.key.NAME`.
_WORDS = r"secret|password|passwd|token|access[.]?key|account[.]?key"
_SECRET = re.compile(_WORDS, re.IGNORECASE)
_SECRET_OPTION = re.compile(rf"(?:{_WORDS})[^\s=]*=", re.IGNORECASE)
"""A secret within a value: an option of Java, or a parameter of a JDBC URL."""


@dataclass(frozen=True)
class ProfileManifest:
    """Profiles in the order of the document: the first that matches a key applies."""

    profiles: tuple[Profile, ...] = ()

    @property
    def warnings(self) -> tuple[Problem, ...]:
        return ()

    @property
    def size(self) -> int:
        return len(self.profiles)

    def document(self) -> dict[str, Any]:
        return {_PROFILES: [profile.document() for profile in self.profiles]}


def load_profiles(text: str) -> ProfileManifest:
    """Parse a document of JSON or YAML. Raises `InvalidDocumentError` with every error of the text."""
    return _Reader().read(read_document(text))


def load_profiles_json(text: str) -> ProfileManifest:
    """As `load_profiles`, but of JSON only. Raises `InvalidDocumentError`."""
    return _Reader().read(read_json(text))


def _is_secret(name: str, value: object) -> bool:
    if _SECRET.search(name):
        return True
    return isinstance(value, str) and (_SECRET_OPTION.search(value) is not None or mask_uri(value) != value)


class _Reader(DocumentReader):
    """Reads one document."""

    def read(self, value: Any) -> ProfileManifest:
        listed = self.members(value, "", {_PROFILES}).get(_PROFILES, [])
        if not isinstance(listed, list):
            self.refuse(_PROFILES, "a list of profiles is expected")
        elif len(listed) > MAX_PROFILES:
            self.refuse(_PROFILES, f"there are {len(listed)} profiles; at most {MAX_PROFILES} are possible")
        self.raise_problems()
        found = [profile for number, item in enumerate(listed) for profile in self._profile(number, item)]
        self.raise_problems()
        return ProfileManifest(tuple(found))

    def _profile(self, number: int, value: Any) -> Iterator[Profile]:
        path = f"{_PROFILES}.{number}"
        members = self.members(value, path, set(Profile.model_fields))
        if not isinstance(value, Members):
            return
        if isinstance(conf := members.get("spark_conf"), Members):
            names = [name for name, _ in conf.pairs]
            members["spark_conf"] = dict(conf.pairs)
            for name in {name for name in names if names.count(name) > 1}:
                self.refuse(f"{path}.spark_conf.{name}", "it is given twice")
            for name in dict.fromkeys(name for name, value in conf.pairs if _is_secret(name, value)):
                self._refuse_secret(f"{path}.spark_conf.{name}")
        if isinstance(master := members.get("spark_master"), str) and (_SECRET.search(master) or "@" in master):
            self._refuse_secret(f"{path}.spark_master")
        try:
            yield Profile.model_validate(members)
        except ValidationError as error:
            for problem in problems_of(error, {}):
                self.refuse(".".join([path, *problem.path]), problem.message)

    def _refuse_secret(self, path: str) -> None:
        # RabbitMQ shows global parameters, and the API shows the document.
        self.refuse(path, "a stored document is no place for a secret: set it in worker.spark_conf or worker.profiles")
