"""Messages of the log are sent again once, at a rate, and the progress survives whatever ends the run."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from typing import Any

import pytest

from osrdyne.amqp import Message
from osrdyne.amqp.stream_frames import StreamMessage
from osrdyne.amqp.streams import StreamRange
from osrdyne.client.request import CallTimes, Sender, build_request
from osrdyne.errors import BrokerUnavailableError, ConfigurationError
from osrdyne.protocol.deadlines import deadline_ms
from osrdyne.telemetry.resend import BATCH, Progress, Resend, ResendOrder, request_of
from osrdyne.testing.clock import VirtualClock

ORDER = ResendOrder("plant", "alarms", 5, None)


class Streams:
    """Has messages 0 to 249 in each partition, which arrive in parts of 30."""

    async def bounds(self, stream: str) -> StreamRange:
        return StreamRange(0, 250)

    async def read(self, stream: str, wanted: StreamRange, *, prefetch: int) -> AsyncIterator[list[StreamMessage]]:
        for start in range(wanted.start, wanted.stop, 30):
            yield [
                StreamMessage(one, "", stream, b"", {"x-osrdyne-key": "k"}, message_id=f"{stream}/{one}")
                for one in range(start, min(start + 30, wanted.stop))
            ]


class Requests:
    """Confirms requests until `fails_at`; the connection is lost then."""

    def __init__(self, clock: VirtualClock, *, fails_at: int | None = None) -> None:
        self.clock, self.fails_at = clock, fails_at
        self.sent: list[str | None] = []
        self.times: list[float] = []

    async def publish(self, message: Message, *, exchange: str, routing_key: str, mandatory: bool = False) -> None:
        assert (exchange, routing_key, mandatory) == ("alarms-req-xchg", "k", True)
        if len(self.sent) == self.fails_at:
            raise BrokerUnavailableError("The connection is lost.")
        self.sent.append(message.message_id)
        self.times.append(self.clock.monotonic())


def resend(progress: Progress, requests: Requests, *, rate: float | None = None) -> Resend:
    return Resend(progress, streams=Streams(), publisher=requests, rate=rate, clock=requests.clock)  # type: ignore[arg-type]


@pytest.mark.parametrize("fails_at", [0, 1, 99, 100, 101, 199, 244])
@pytest.mark.proves("telemetry/osrdyne-telemetry-resend-interrupted")
async def test_interrupted_run_is_continued_with_at_most_one_batch_twice(clock, tmp_path, fails_at):
    state = tmp_path / "state"
    first, second = Requests(clock, fails_at=fails_at), Requests(clock)
    with pytest.raises(BrokerUnavailableError):
        await resend(Progress.load(ORDER, state), first).partition(2)
    count = await resend(Progress.load(ORDER, state), second).partition(2)
    wanted = [f"plant-log-2/{one}" for one in range(5, 250)]
    assert second.sent == wanted[-count:]
    assert first.sent[: len(wanted) - count] + second.sent == wanted
    assert 0 <= len(first.sent) + count - len(wanted) < BATCH
    assert await resend(Progress.load(ORDER, state), Requests(clock)).partition(2) == 0


@pytest.mark.parametrize(("rate", "seconds"), [(None, 0.0), (10.0, 24.0), (0.5, 488.0), (1_000.0, 0.2)])
async def test_messages_are_sent_at_the_rate(clock, rate, seconds):
    requests = Requests(clock)
    running = asyncio.create_task(resend(Progress(ORDER), requests, rate=rate).partition(0))
    await clock.advance(1_000)
    assert await running == 245
    assert requests.times[-1] - requests.times[0] == pytest.approx(seconds)
    most = max(sum(1 for one in requests.times if one == at) for at in requests.times)
    assert most <= (245 if rate is None else max(1, min(rate, BATCH)))


def test_request_has_what_the_client_sent_but_its_deadline_and_names_its_place():
    headers = {"x-osrdyne-route": "log", "x-osrdyne-principal": "me", "level": "alarm", "x-telemetry-replay": "x"}
    request = request_of(StreamMessage(7, "", "s", b"body", headers, message_id="m", content_type="c"), "plant-log-1")
    assert request.headers == {"level": "alarm", "x-telemetry-replay": "plant-log-1/7"}
    assert (request.body, request.message_id, request.content_type, request.reply_to) == (b"body", "m", "c", None)
    times = CallTimes(1_000.0, 60.0)
    sent = build_request("k", "", {}, correlation_id="c", times=times, sender=Sender("test")).message
    again = request_of(StreamMessage(7, "", "s", sent.body, sent.headers, timestamp=sent.timestamp), "plant-log-1")
    read: Any = {"expiration": again.expiration, "timestamp": again.timestamp, "first_seen_ms": 0}
    assert deadline_ms(headers=sent.headers, **read) == 1_060_000
    assert deadline_ms(headers=again.headers, **read) is None


@pytest.mark.parametrize("content", ["", "[]", '{"order": 1}', '{"order": {}, "ranges": {}}'])
def test_file_that_is_not_the_progress_of_this_replay_is_refused(tmp_path, content):
    (tmp_path / "state").write_text(content)
    with pytest.raises(ConfigurationError, match=r"--state: .*; name another file"):
        Progress.load(ORDER, tmp_path / "state")


def test_progress_is_on_disk_before_and_after_its_file_gets_its_name(tmp_path, monkeypatch):
    synced: list[tuple[bool, list[str]]] = []

    def fsync(descriptor):
        names = sorted(path.name for path in tmp_path.iterdir())
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), names))

    monkeypatch.setattr(os, "fsync", fsync)
    Progress(ORDER, tmp_path / "state").save()
    assert synced == [(False, ["state.tmp"]), (True, ["state"])]
