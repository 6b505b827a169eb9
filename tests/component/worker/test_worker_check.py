"""`osrdyne-worker --check`: errors of an application that it reports before a worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from osrdyne_worker.main import main
from osrdyne_worker.runtime.exit import ExitCode

HEAD = "from osrdyne_worker import App\napp = App()\n"


@pytest.mark.parametrize(
    ("handler", "code", "error"),
    [
        pytest.param("@app.handler('/p')\ndef p(call): ...", ExitCode.STOPPED, "", id="valid"),
        pytest.param(
            "@app.handler('/p')\ndef p(): ...",
            ExitCode.INVALID_CONFIGURATION,
            "The handler p of '/p' must take (call) or (call, request).",
            id="signature",
        ),
        pytest.param(
            "@app.default_handler\ndef p(call, request: 'Nowhere'): ...",
            ExitCode.INVALID_CONFIGURATION,
            "name 'Nowhere' is not defined",
            id="request-type",
        ),
        pytest.param(
            "class Plain: ...\n@app.handler('/p')\ndef p(call, request: Plain): ...",
            ExitCode.INVALID_CONFIGURATION,
            "The request type of the handler p of '/p' cannot be validated: Unable to generate pydantic-core schema "
            "for <class 'checked_plain_class.Plain'>; use a pydantic model, a dataclass, or types such as "
            "dict[str, int]\n",
            id="plain-class",
        ),
        pytest.param(
            "@app.handler\ndef p(call): ...",
            ExitCode.INVALID_CONFIGURATION,
            "@app.handler needs the path of its requests: write @app.handler('/p').",
            id="handler-without-path",
        ),
        pytest.param(
            "@app.batch_handler\ndef p(calls): ...",
            ExitCode.INVALID_CONFIGURATION,
            "@app.batch_handler needs the path of its requests: write @app.batch_handler('/p').",
            id="batch-without-path",
        ),
        pytest.param(
            "@app.on_start\ndef load(): ...",
            ExitCode.INVALID_CONFIGURATION,
            "The on_start function load must take (context).",
            id="hook",
        ),
        pytest.param(
            "import sys\nsys.exit(3)",
            ExitCode.INVALID_CONFIGURATION,
            "The module 'checked_exit' cannot be imported: SystemExit: 3 (checked_exit.py, line 4)",
            id="exit",
        ),
    ],
)
def test_check_reports_an_invalid_handler(
    handler: str,
    code: ExitCode,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    name = f"checked_{request.node.callspec.id.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(f"{HEAD}{handler}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["--check", f"{name}:app"])
    assert ended.value.code == code
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reference", "error"),
    [
        ("./echo:app", "'./echo' is no module but a path: write echo:app in the directory of echo.py."),
        ("apps/echo:main", "'apps/echo' is no module but a path: write echo:main in the directory of echo.py."),
        (".echo:app", "'.echo' is no module but a path: write echo:app in the directory of echo.py."),
        (
            "./echo.py",
            "must be given as module:attribute, not './echo.py': write echo:app in the directory of echo.py.",
        ),
    ],
)
def test_check_reports_a_path_in_place_of_a_module(
    reference: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--check", reference])
    assert ended.value.code == ExitCode.INVALID_CONFIGURATION
    assert error in capsys.readouterr().err
