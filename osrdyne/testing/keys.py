"""Odd keys, which break code that treats a key as syntax. Every component that takes keys is tested with them."""

from __future__ import annotations

from osrdyne.protocol.names import Key

ODD_KEYS: dict[str, Key] = {
    name: Key(text)
    for name, text in {
        "specification": "infra=42,timetable=24",
        "path": "tpch/sf=0.01",
        "punctuation": "/ % # * . : _ + - ~ \\ ? & ; = $ ^ ( ) [ ] { } |",
        "accent": "é",
        "chinese": "漢",
        "emoji": "🚄",
        "blanks": "  a  b ",
        "newlines": "a\nb\r\nc\n",
        "quotes": "'a' \"b\" `c` $(d) ${e}",
        "parent": "../../etc/passwd",
        "option": "--help",
        "nul": "a\0b",
        "plain": "A",
        "escape-of-plain": "%41",
        "queue-name": "+41_Pri3",
        "lower-case": "a",
        "empty": "",
        "longest": "x" * 255,
        "longest-but-one": "x" * 254,
        "longest-odd": "漢" * 85,
    }.items()
}
"""Keys by their test ids."""
