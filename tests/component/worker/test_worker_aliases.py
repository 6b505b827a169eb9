"""Import paths of the former layout: each works for one release, with a warning."""

import importlib
import sys

import pytest

import osrdyne_worker
from osrdyne_worker.main import main


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        ("osrdyne_worker.runtime.app", "App", osrdyne_worker.App),
        ("osrdyne_worker.runtime.call", "RequestError", osrdyne_worker.RequestError),
        ("osrdyne_worker.runtime.main", "main", main),
    ],
)
def test_former_import_path_works_with_a_warning(alias, name, value):
    sys.modules.pop(alias, None)
    with pytest.warns(DeprecationWarning, match=alias):
        module = importlib.import_module(alias)
    assert getattr(module, name) is value
