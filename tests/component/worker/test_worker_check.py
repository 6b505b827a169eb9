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
