"""Callers that wait for a start learn its position and time, from one leader and from the next: real processes."""

import asyncio

import pytest
from daemon_process import PATIENCE, until

from osrdyne.client import AsyncClient, StartProgress


@pytest.mark.proves("requests/leader-killed-callers-wait")
async def test_callers_learn_their_position_and_go_on_with_the_next_leader(make_daemon, tmp_path):
    daemon = make_daemon(lifecycle={"max_concurrent_starts": 1, "resync_interval": "2s"})
    gates = {key: tmp_path / f"gate-{key}" for key in ("a", "b", "c")}
    daemon.set_faults({key: {"until": str(gate)} for key, gate in gates.items()})
    await daemon.start()
    seen: dict[str, list[StartProgress]] = {key: [] for key in gates}
    async with (
        AsyncClient(daemon.amqp_uri, daemon.pool, default_timeout=PATIENCE) as client,
        asyncio.TaskGroup() as group,
    ):
        calls = []
        for key in gates:
            calls.append(group.create_task(client.call(key, "/echo", b"x", on_starting=seen[key].append)))
            # Starts are ordered by the moment at which the queue of the key exists, not by the call.
            await daemon.until_group(
                key, lambda group: group["workers"] or "max_concurrent_starts" in group["reason"], "it starts, or waits"
            )
        await until(
            lambda: [seen[key] and seen[key][-1].position for key in gates] == [0, 1, 2], "all know their place"
        )
        assert seen["c"][-1].waiting_for == "max_concurrent_starts"

        daemon.kill()
        for texts in seen.values():
            texts.clear()
        await daemon.start()
        await until(lambda: all(seen.values()), "the next leader tells them")

        gates["a"].touch()
        await calls[0]
        await until(lambda: 0 in [texts[-1].position for texts in (seen["b"], seen["c"])], "the next one starts")
        first = "b" if seen["b"][-1].position == 0 else "c"
        assert seen[first][-1].waiting_for is None
        for gate in gates.values():
            gate.touch()
        assert [(await call).body for call in calls] == [b"x"] * 3
        # A call of a running key is answered before the client asks.
        silent: list[StartProgress] = []
        await client.call("a", "/echo", b"x", on_starting=silent.append)
        assert silent == []
