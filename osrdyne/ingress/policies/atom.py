"""A queue policy in XML: `QueuePolicy` in an entry of Atom (RFC 4287), as in seed 003. Pure.

`policy_element` writes the element and `entry_json` reads an entry; an effective policy that was written is read to the
same values.
"""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree import ElementTree as xml

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import DefusedXMLParser

from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.ingress.policies.elements import BY_NAME, ELEMENTS
from osrdyne.ingress.policies.policy import EffectivePolicy

ATOM_TYPE = "application/atom+xml"
ATOM = "http://www.w3.org/2005/Atom"
CONNECT = "https://schemas.microsoft.com/ws/2007/08/connect"
ADDRESSING = "http://www.w3.org/2005/08/addressing"
"""WS-Addressing 1.0: PoisonMessageDrop is an endpoint reference, with its address in an element `Address`."""
MAX_CHARACTERS = 8 * 1024  # An entry with every element has about 3,000. The parser repeats a namespace in each name.
MAX_DEPTH = 16

_POLICY = "QueuePolicy"
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_WHOLE = re.compile(r"\d{1,100}\Z", re.ASCII)


def xml_text(text: str) -> str:
    """The text with U+FFFD for characters that XML cannot hold."""
    return _NOT_XML.sub("\ufffd", text)


def policy_element(policy: EffectivePolicy) -> xml.Element:
    """The policy as an element `QueuePolicy`."""
    found = xml.Element(f"{{{CONNECT}}}{_POLICY}")
    for element in ELEMENTS:
        if (value := getattr(policy, element.field)) is None:
            continue
        written = xml.SubElement(found, f"{{{CONNECT}}}{element.name}")
        if element.is_endpoint:
            written = xml.SubElement(written, f"{{{ADDRESSING}}}Address")
        written.text = xml_text(element.show_xml(value))
    return found


def entry_json(text: str) -> str:
    """The proposal in an entry of Atom, as the text of the same proposal in JSON. Everything else in the entry, such as
    links, is ignored. Raises `InvalidDocumentError`."""
    entry = _parsed(text)
    policies = [one for one in entry if _named(one, CONNECT) == _POLICY]
    if _named(entry, ATOM) != "entry" or len(policies) != 1:
        raise InvalidDocumentError(
            [Problem(f"one {_POLICY} of the namespace {CONNECT} is expected, in an entry of {ATOM}", path="entry")]
        )
    values: dict[str, Any] = {}
    problems = []
    for one in policies[0]:
        name = _named(one, CONNECT)
        content = _address(one) if name in BY_NAME and BY_NAME[name].is_endpoint else one
        value = (content.text or "").strip()
        if name in values:
            problems.append(Problem("it is given twice: remove one", path=name))
        elif len(content):
            problems.append(Problem("it has elements: write its value as text", path=name))
        values[name] = int(value) if _WHOLE.match(value) else value
    if problems:
        raise InvalidDocumentError(problems)
    return json.dumps(values)


def _address(endpoint: xml.Element) -> xml.Element:
    """The address of an endpoint reference; an element without one is read as text."""
    return next((child for child in endpoint if _named(child, ADDRESSING) == "Address"), endpoint)


class _Tree(xml.TreeBuilder):
    """Builds elements up to `MAX_DEPTH`."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[str] = []

    def start(self, tag: str, attrs: dict[str, str], /) -> xml.Element:
        self._open.append(tag)
        if len(self._open) > MAX_DEPTH:
            path = self._open[-1].rpartition("}")[2]
            raise InvalidDocumentError([Problem(f"elements are nested more than {MAX_DEPTH} deep", path=path)])
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> xml.Element:
        self._open.pop()
        return super().end(tag)


def _parsed(text: str) -> xml.Element:
    if len(text) > MAX_CHARACTERS:
        raise InvalidDocumentError(
            [Problem(f"it has {len(text)} characters; an entry has at most {MAX_CHARACTERS}: send the policy alone")]
        )
    parser = DefusedXMLParser(target=_Tree(), forbid_dtd=True)
    try:
        parser.feed(text)
        root: xml.Element = parser.close()
    except xml.ParseError as error:
        line, column = error.position
        raise InvalidDocumentError([Problem(f"this is not XML: {error.msg}", column + 1, line=line)]) from None
    except DefusedXmlException:
        raise InvalidDocumentError([Problem("it has a document type declaration: remove it", path="DOCTYPE")]) from None
    return root


def _named(element: xml.Element, namespace: str) -> str:
    """The name of an element of this namespace, which may begin with `http` or `https`; of another, with its own."""
    found, _, name = element.tag.rpartition("}")
    # Specifications of that time and their copies differ in the scheme, and in line breaks before it.
    scheme, _, rest = found.lstrip("{").strip().partition("://")
    return name if scheme in {"http", "https"} and rest == namespace.partition("://")[2] else element.tag
