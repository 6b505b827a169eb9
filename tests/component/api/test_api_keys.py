"""Every key survives its way through a URL, exactly once decoded."""

import asyncio
from urllib.parse import quote, quote_plus, urlencode

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.api.keys import path_key, query_key, query_keys, status_keys
from osrdyne.errors import InvalidKeyError

KEYS = st.text(st.characters(codec="utf-8"), max_size=63)
"""63 characters of UTF-8 have at most 252 bytes."""


def request(*, query: str = "", key: str = "") -> Request:
    return Request({"type": "http", "query_string": query.encode("ascii"), "path_params": {"key": key}})


@given(KEYS)
def test_any_key_survives_the_path_and_the_query_in_both_styles(key):
    assert asyncio.run(path_key(request(key=quote(key, safe="")))) == key
    for encoded in (quote(key, safe=""), quote_plus(key)):
        assert asyncio.run(query_key(request(query=f"x=1&key={encoded}"))) == key


@given(st.sets(KEYS))
def test_repeated_keys_are_a_set_or_nothing(keys):
    query = urlencode([("key", key) for key in keys])
    assert asyncio.run(query_keys(request(query=query))) == (keys or None)


@given(st.lists(KEYS, min_size=1) | st.just([f"infra={number},timetable={number}" for number in range(100)]))
def test_keys_of_the_reference_client_are_all_asked_for(keys):
    joined = ",".join(quote(key, safe="") for key in keys)
    asked = asyncio.run(status_keys(request(query=f"keys={joined}")))
    assert asked is not None
    assert set(keys) <= asked


def test_encoded_name_of_the_parameter_is_the_same_parameter():
    # The audit decodes names: a second key that the endpoint does not see would be in the record of the change.
    assert asyncio.run(query_key(request(query="%6Bey=a"))) == "a"
    with pytest.raises(InvalidKeyError, match="has 2"):
        asyncio.run(query_key(request(query="key=a&%6Bey=b")))
