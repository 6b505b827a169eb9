"""Data versions through real worker processes and a real RabbitMQ."""

import pytest
from broker_api import until

pytestmark = pytest.mark.usefixtures("processes")

APP = "tests.integration.changing_app:app"


@pytest.mark.proves("workers/worker-dies-reloads-data")
async def test_worker_that_dies_in_a_reload_loses_no_request(pool, tmp_path):
    data, hold, die, reloads = (tmp_path / name for name in ("data", "hold", "die", "reloads"))
    config = {"directory": str(tmp_path)}
    data.write_text("0")
    first = await pool.start(app=APP, config=config)
    hold.touch()
    die.touch()
    data.write_text("1")
    asked = [await pool.caller.send("/data", headers={"x-data-version": 1}) for _ in range(3)]
    await until(reloads.exists)
    assert (await pool.caller.call("/data")).body == b"0", "the former data, as long as it is loaded"
    hold.unlink()
    assert await first.wait() == 9
    die.unlink()
    asked.append(await pool.caller.send("/data"))
    await pool.start(app=APP, config=config, ready=False)
    responses = [await pool.caller.answer(one) for one in asked]
    assert [response.body for response in responses] == [b"1"] * 4
