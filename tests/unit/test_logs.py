"""Logs: one line an event, and no password in any of them."""

import io
import json
import logging
from contextlib import suppress

import pytest
import structlog

from osrdyne.logs import configure_application_logs, configure_logging, get_logger, mask_uri

SECRET = "s3cret"


@pytest.fixture(autouse=True)
def restored_logging():
    yield
    structlog.reset_defaults()


def test_password_of_every_uri_is_masked():
    masked = {
        "amqp://user:s3cret@host:5672/vhost": "amqp://user:***@host:5672/vhost",
        "connect to AMQPS://user:s3cret@host failed": "connect to AMQPS://user:***@host failed",
        "amqp://:s3cret@host": "amqp://:***@host",
        "http://u:s3cret@a and amqp://v:s3cret@b": "http://u:***@a and amqp://v:***@b",
        "amqp://host:5672/vhost": "amqp://host:5672/vhost",
        "no uri: a@b": "no uri: a@b",
    }
    masked |= {f"amqp://user:s3cret{one}s3cret@host/": "amqp://user:***@host/" for one in "/@:"}
    assert {text: mask_uri(text) for text in masked} == masked


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
@pytest.mark.proves("reference-defects/13-password-logs")
def test_no_way_into_the_log_carries_a_password(as_json):
    stream = io.StringIO()
    configure_logging(json=as_json, stream=stream)
    uri = f"amqp://user:{SECRET}@host/"
    log = get_logger("test", bound=uri)
    try:
        raise OSError(f"cannot reach {uri}")
    except OSError as error:
        log.exception("broker lost", nested={"uris": [uri]}, error=error, raw=uri.encode())
    assert "broker lost" in stream.getvalue()
    assert SECRET not in stream.getvalue()


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_line_that_cannot_be_written_is_dropped(as_json):
    with open("/dev/full", "w", encoding="utf-8", buffering=1) as stream:  # noqa: PTH123 — each write fails
        configure_logging(json=as_json, stream=stream)
        log = get_logger("test")
        log.info("worker started")
        log.error("broker lost")
        with suppress(OSError):
            stream.close()


def test_text_of_a_caller_cannot_act_on_a_terminal():
    stream, forged = io.StringIO(), "a\r \x1b[2J\x9b\x07\u2028b"
    configure_logging(json=False, stream=stream)
    get_logger("pool").info("key required", key=f"{forged}\n", keys=[forged], error=ValueError(forged))
    configure_application_logs({}, json=False, stream=stream)
    logging.getLogger("application").info("asked for %s", forged)
    lines = stream.getvalue().splitlines()
    assert [line.isprintable() for line in lines] == [True, True]


def test_stream_that_is_not_a_terminal_gets_json_of_the_level_with_the_phrase_and_its_keys():
    stream = io.StringIO()
    configure_logging(level="warning", stream=stream)
    log = get_logger("pool.tracker", pool="p")
    log.info("quiet")
    log.warning("key required", key='a "b"\n', uri="amqp://u:p@h:1/\n", n=1)
    event = json.loads(stream.getvalue())
    assert (event["event"], event["level"], event["pool"], event["key"]) == ("key required", "warning", "p", 'a "b"\n')
    assert event["uri"] == "amqp://u:***@h:1/\n"
    assert "pool.tracker" in event.values()


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_records_of_python_have_the_level_of_their_logger(as_json, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    stream = io.StringIO()
    configure_application_logs({"root": "error", "noisy.part": "debug"}, json=as_json, stream=stream)
    try:
        logging.getLogger("noisy").warning("left out")
        logging.getLogger("noisy.part").debug("at %s", f"amqp://user:{SECRET}@host/")
    finally:
        logging.getLogger("noisy.part").setLevel(logging.NOTSET)
    (line,) = stream.getvalue().splitlines()
    assert all(part in line for part in ("noisy.part", "debug", "at amqp://user:***@host/"))
