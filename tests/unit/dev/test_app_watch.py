"""Which files `osrdyne dev` watches."""

import pytest

from osrdyne.dev.app_watch import files_of


@pytest.mark.parametrize(
    ("app", "watched"),
    [
        ("mine:app", {"mine.py", "helper.py"}),
        ("package.api.web:app", {"package/__init__.py", "package/api/web.py"}),
        ("json:app", set()),
    ],
)
def test_files_of_the_application_are_those_of_its_package_or_beside_its_module(tmp_path, app, watched):
    for name in ("mine.py", "helper.py", "notes.txt", "package/__init__.py", "package/api/web.py", "other/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert {str(path.relative_to(tmp_path)) for path in files_of(app, tmp_path)} == watched
