"""Data versions through real worker processes and a real RabbitMQ."""

from pathlib import Path

import pytest
from broker_api import until

pytestmark = pytest.mark.usefixtures("processes")

APP = "tests.integration.changing_app:app"


class Directory:
    """The data of one key."""

    def __init__(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        self.publish("0")

    def publish(self, text: str) -> None:
        unfinished = self.path / "unfinished"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(self.path / "data")

    def reloads(self) -> list[str]:
        file = self.path / "reloads"
        return file.read_text(encoding="utf-8").split() if file.exists() else []


def version(number: int) -> dict[str, object]:
    return {"headers": {"x-data-version": number}}


@pytest.mark.proves("workers/worker-dies-reloads-data")
async def test_worker_that_dies_in_a_reload_loses_no_request(pool, tmp_path):
    directory = Directory(tmp_path / "k")
    first = await pool.start(app=APP, config={"directory": str(directory.path)})
    for name in ("hold", "die"):
        (directory.path / name).touch()
    directory.publish("1")
    asked = [await pool.caller.send("/data", **version(1)) for _ in range(3)]
    await until(directory.reloads)
    assert (await pool.caller.call("/data")).body == b"0", "the former data, as long as it is loaded"
    (directory.path / "hold").unlink()
    assert await first.wait() == 9
    (directory.path / "die").unlink()
    asked.append(await pool.caller.send("/data"))
    await pool.start(app=APP, config={"directory": str(directory.path)}, ready=False)
    responses = [await pool.caller.answer(one) for one in asked]
    assert [response.body for response in responses] == [b"1"] * 4


async def test_each_key_of_a_pooled_process_has_its_own_version(pooled, tmp_path):
    process = await pooled.start(APP)
    directories = {key: Directory(tmp_path / key) for key in ("a", "b")}
    for key, one in directories.items():
        await pooled.assign(process, key, config={"directory": str(one.path)})
        one.publish(f"1 of {key}")
    assert (await pooled.call("a", "/data", **version(1))).body == b"1 of a"
    other = await pooled.call("b", "/data")
    assert (other.body, other.headers.get("x-data-version")) == (b"0", None)
    assert directories["b"].reloads() == []
    (directories["b"].path / "hold").touch()  # a reload of one key keeps no other from its own
    held = await pooled.send("b", "/data", **version(1))
    await until(directories["b"].reloads)
    directories["a"].publish("2 of a")
    assert (await pooled.call("a", "/data", **version(2))).body == b"2 of a"
    (directories["b"].path / "hold").unlink()
    assert (await pooled.stage.caller.answer(held)).body == b"1 of b"
