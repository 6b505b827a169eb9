"""Import paths of the former layout: each works for one release, with a warning."""

import importlib
import sys

import pytest

from osrdyne_worker import App, RequestError
from osrdyne_worker.main import main


@pytest.mark.parametrize(
    ("alias", "name", "value"), [("app", "App", App), ("call", "RequestError", RequestError), ("main", "main", main)]
)
def test_former_import_path_works_with_a_warning(alias, name, value):
    sys.modules.pop(path := f"osrdyne_worker.runtime.{alias}", None)
    with pytest.warns(DeprecationWarning, match=path):
        module = importlib.import_module(path)
    assert getattr(module, name) is value
