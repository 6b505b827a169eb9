"""The check of a key before its worker starts: what counts as an answer, and what lets the worker start."""

import threading

import pytest

from osrdyne.errors import ConfigurationError
from osrdyne.pool.workers.key_check import UNKNOWN_KEY, KeyCheck, load_key_test
from osrdyne.protocol.names import Key

A = Key("a")


@pytest.mark.parametrize(
    ("test", "refused"),
    [(lambda key: key == "a", False), (lambda key: key == "b", True), (lambda key: 1 / 0, False), (None, False)],
    ids=["exists", "is missing", "fails", "no check"],
)
async def test_only_a_key_that_is_known_to_be_missing_is_refused(test, refused):
    refusal = await KeyCheck(test).refusal(A)
    assert (None if refusal is None else (refusal.code, refusal.error_code)) == (
        (404, UNKNOWN_KEY) if refused else None
    )


async def test_check_that_hangs_lets_the_worker_start():
    end = threading.Event()
    assert await KeyCheck(lambda key: end.wait(60.0), timeout=0.01).refusal(A) is None
    end.set()


@pytest.mark.parametrize(
    ("key", "exists"), [("a", True), ("a/b", True), ("c", False), ("../a", False), ("a/../..", False), ("\0", False)]
)
async def test_key_exists_if_its_path_does(tmp_path, key, exists):
    (tmp_path / "of" / "a" / "b").mkdir(parents=True)
    test = load_key_test(f"{tmp_path}/of/{{key}}")
    assert (await KeyCheck(test).refusal(Key(key)) is None) == exists


@pytest.mark.parametrize("setting", ["no_such_module:f", "math:no_such", "math:pi", "asyncio:sleep"])
def test_setting_that_names_no_plain_function_is_refused_by_its_name(setting):
    with pytest.raises(ConfigurationError, match=r"worker\.key_exists"):
        load_key_test(setting)
    assert load_key_test("os.path:exists") is not None
