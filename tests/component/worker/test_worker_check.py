"""`osrdyne-worker --check`: errors of an application that it reports before a worker starts."""

import sys

import pytest

from osrdyne_worker.main import main
from osrdyne_worker.runtime.exit import ExitCode

HEAD = "from osrdyne_worker import App\napp = App()\n"


SIGNATURE, HOOK = "@app.handler('/p')\ndef p(): ...", "@app.on_start\ndef load(): ..."
REQUEST_TYPE = "@app.default_handler\ndef p(call, request: 'Nowhere'): ..."
PLAIN_CLASS = "class Plain: ...\n@app.handler('/p')\ndef p(call, request: Plain): ..."


@pytest.mark.parametrize(
    ("handler", "names"),
    [
        pytest.param("@app.handler('/p')\ndef p(call): ...", None, id="valid"),
        pytest.param(SIGNATURE, ["'/p'", "(call, request)"], id="signature"),
        pytest.param(REQUEST_TYPE, ["'Nowhere'"], id="request-type"),
        pytest.param(PLAIN_CLASS, ["'/p'", "checked.Plain"], id="plain-class"),
        pytest.param("@app.handler\ndef p(call): ...", ["@app.handler('/p')"], id="handler-without-path"),
        pytest.param("@app.batch_handler\ndef p(calls): ...", ["@app.batch_handler('/p')"], id="batch-without-path"),
        pytest.param(HOOK, ["on_start", "load", "(context)"], id="hook"),
        pytest.param("import sys\nsys.exit(3)", ["SystemExit: 3", "checked.py, line 4"], id="exit"),
    ],
)
def test_check_reports_an_invalid_handler(handler, names, tmp_path, monkeypatch, capsys):
    """`names`: what the error names; None: there is none."""
    (tmp_path / "checked.py").write_text(f"{HEAD}{handler}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "checked", raising=False)
    code, error = check("checked:app", capsys)
    assert code == (ExitCode.STOPPED if names is None else ExitCode.INVALID_CONFIGURATION)
    assert [name for name in names or [] if name not in error] == []


def check(reference: str, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        main(["--check", reference])
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize("reference", ["./echo:app", "apps/echo:app", ".echo:app", "./echo.py"])
def test_check_reports_a_path_in_place_of_a_module(reference, capsys):
    code, error = check(reference, capsys)
    assert (code, "write echo:app" in error) == (ExitCode.INVALID_CONFIGURATION, True)
