"""The options of `rabbitmq-stream`: what is wrong is named with its remedy, and no value is guessed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from osrdyne.errors import ConfigurationError
from osrdyne_sources.rabbit_stream.broker import read_uri
from osrdyne_sources.rabbit_stream.options import NAMES, Position, parse_options

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "rabbitmq-stream-source.md"
GIVEN = {"uriFile": "/run/secrets/uri", "stream": "log"}


def test_options_have_defaults_and_any_case_and_names_are_data() -> None:
    options = parse_options({"URIFILE": "/run/secrets/uri", "Stream": "log"})
    assert (options.uri_file, options.streams) == ("/run/secrets/uri", ("log",))
    assert (options.starting_offsets, options.ending_offsets) == (Position("earliest"), Position("latest"))
    assert options.fail_on_data_loss is True
    assert parse_options({**GIVEN, "stream": '["a", b*'}).streams == ('["a", b*',)


def test_offsets_of_some_streams_leave_the_default_to_the_others() -> None:
    options = parse_options({"uriFile": "u", "streams": '["a", "b"]', "endingOffsets": '{"b": 7}'})
    assert options.ending_offsets == Position("latest", {"b": 7})
    assert parse_options({**GIVEN, "startingOffsets": "7"}).starting_offsets == Position("earliest", {"log": 7})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"uriFile": ""}, "uriFile"),
        ({"uriFile": "amqp://u:secret@host"}, "uriFile"),
        ({"uri": "amqp://u:secret@host"}, "option uri .*uriFile"),
        ({"password": "secret"}, "option password .*uriFile"),
        ({"streams": '["a"]'}, "stream .* and streams"),
        ({"stream": ""}, "255"),
        ({"stream": "x" * 256}, "255"),
        ({"stream": None, "streams": "[]"}, "1000"),
        ({"stream": None, "streams": '["a", "a"]'}, "twice"),
        ({"stream": None, "streams": "a, b"}, "streams .*JSON"),
        ({"stream": None, "streams": "[" * 100_000}, "streams .*JSON"),
        ({"startingOffsets": "first"}, "startingOffsets .*JSON"),
        ({"startingOffsets": '"earliest"'}, "startingOffsets .*earliest"),
        ({"startingOffsets": '{"lag": 1}'}, "startingOffsets .*'lag'"),
        ({"endingOffsets": "-1"}, "endingOffsets.*'log'"),
        ({"endingOffsets": "9223372036854775808"}, "endingOffsets.*'log'"),
        ({"endingOffsets": "true"}, "endingOffsets .*earliest"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger .*1"),
        ({"prefetch": "65536"}, "prefetch .*65535"),
        ({"timeout": "1.5"}, "timeout"),
        ({"failOnDataLoss": "no"}, "failOnDataLoss .*true or false"),
        ({"failOnDataloose": "no"}, "failondataloose.*failOnDataLoss"),
    ],
    ids=str,
)
def test_an_invalid_option_is_named(options: dict[str, str | None], named: str) -> None:
    given = {name: value for name, value in {**GIVEN, **options}.items() if value is not None}
    with pytest.raises(ConfigurationError, match=named) as refused:
        parse_options(given)
    assert "secret@" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"a b", b"amqp://u:secret@h\namqp://u:secret@h", b"\xff"], ids=str)
def test_a_file_without_a_uri_is_refused_without_its_content(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "uri"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="uriFile") as refused:
        read_uri(str(file))
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigurationError, match="missing"):
        read_uri(str(tmp_path / "missing"))


def test_every_option_is_documented() -> None:
    text = REFERENCE.read_text(encoding="utf-8").partition("## Columns")[0]
    table = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert table == list(NAMES)
