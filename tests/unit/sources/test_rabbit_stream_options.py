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


def test_options_have_defaults_and_any_case() -> None:
    options = parse_options({"URIFILE": "/run/secrets/uri", "Stream": "log"})
    assert (options.uri_file, options.streams) == ("/run/secrets/uri", ("log",))
    assert (options.starting_offsets, options.ending_offsets) == (Position("earliest"), Position("latest"))
    assert (options.max_offsets_per_trigger, options.max_offsets_per_partition) == (None, 1_000_000)
    assert (options.fail_on_data_loss, options.prefetch, options.timeout) == (True, 1_000, 60)


def test_names_of_streams_are_data() -> None:
    assert parse_options({**GIVEN, "stream": '["a", b*'}).streams == ('["a", b*',)


def test_offsets_of_some_streams_leave_the_default_to_the_others() -> None:
    options = parse_options({"uriFile": "u", "streams": '["a", "b"]', "endingOffsets": '{"b": 7}'})
    assert options.ending_offsets == Position("latest", {"b": 7})
    assert parse_options({**GIVEN, "startingOffsets": "7"}).starting_offsets == Position("earliest", {"log": 7})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"uriFile": ""}, "uriFile must be the path"),
        ({"uriFile": "amqp://u:secret@host"}, "uriFile must be the path"),
        ({"uri": "amqp://u:secret@host"}, "option uri is refused.*uriFile"),
        ({"password": "secret"}, "option password is refused.*uriFile"),
        ({"streams": '["a"]'}, "one of the options stream .* and streams"),
        ({"stream": ""}, "1 to 255 bytes"),
        ({"stream": "x" * 256}, "1 to 255 bytes"),
        ({"stream": None, "streams": "[]"}, "JSON array of 1 to 1000"),
        ({"stream": None, "streams": '["a", "a"]'}, "twice"),
        ({"stream": None, "streams": "a, b"}, "streams is not valid JSON"),
        ({"stream": None, "streams": "[" * 100_000}, "streams is not valid JSON"),
        ({"startingOffsets": "first"}, "startingOffsets is not valid JSON"),
        ({"startingOffsets": '"earliest"'}, "startingOffsets must be earliest, latest"),
        ({"startingOffsets": '{"lag": 1}'}, "startingOffsets names the stream 'lag'"),
        ({"endingOffsets": "-1"}, "endingOffsets: the offset of 'log' must be from 0"),
        ({"endingOffsets": "9223372036854775808"}, "endingOffsets: the offset of 'log' must be from 0"),
        ({"endingOffsets": "true"}, "endingOffsets must be earliest, latest"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger must be a whole number from 1"),
        ({"prefetch": "65536"}, "prefetch must be a whole number from 1 to 65535"),
        ({"timeout": "1.5"}, "timeout must be a whole number"),
        ({"failOnDataLoss": "no"}, "failOnDataLoss must be true or false"),
        ({"failOnDataloose": "no"}, "no option failondataloose; did you mean failOnDataLoss"),
    ],
    ids=str,
)
def test_an_invalid_option_is_named(options: dict[str, str | None], message: str) -> None:
    given = {name: value for name, value in {**GIVEN, **options}.items() if value is not None}
    with pytest.raises(ConfigurationError, match=message) as refused:
        parse_options(given)
    assert "secret@" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"a b", b"amqp://u:secret@h\namqp://u:secret@h", b"\xff"], ids=str)
def test_a_file_without_a_uri_is_refused_without_its_content(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "uri"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="option uriFile") as refused:
        read_uri(str(file))
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigurationError, match="No such file"):
        read_uri(str(tmp_path / "missing"))


def test_every_option_is_documented() -> None:
    text = REFERENCE.read_text(encoding="utf-8").partition("## Columns")[0]
    table = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert table == list(NAMES)
