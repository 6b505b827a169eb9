"""The splitter: what a manifest may contain, which rule applies, and the resulting key."""

import json

import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.errors import InvalidKeyError
from osrdyne.ingress.acceptance import TtlLimits
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.explain import explain
from osrdyne.ingress.requests import Arrival, sample_arrival
from osrdyne.ingress.splitter.manifest import load_splitter
from osrdyne.ingress.splitter.overlaps import Automaton, SearchBudget, common_text
from osrdyne.ingress.splitter.rules import Splitter, jump_hash, split_arrival
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import PoolNames
from osrdyne.testing.keys import ODD_KEYS

LIMITS = TtlLimits(default=600.0, longest=604800.0)

SEED = """
"queue-static": {"description": "Simple static splitter", "postfixFromStatic": ["A", "B", "C", "D"]},
"queue-header-[a-z]+": {"description": "Simple splitter with request header", "postfixDelimiter": "+",
  "postfixFromRequest": {"header": "x-rp-deviceid"}},
"queue-path-[a-z]+": {"description": "Simple splitter with request url matching", "postfixDelimiter": "_",
  "postfixFromRequest": {"url": ".*/path1/(.*)/.*"}}
"""


def splitter(rules: object) -> Splitter:
    return Splitter(load_splitter(rules if isinstance(rules, str) else json.dumps(rules)).rules)


def arrival(key: str, path: str = "", **headers: object) -> Arrival:
    return Arrival(Request(key=key, body=b"", path=path, headers=headers), accepted_ms=0)


def keys(splitter: Splitter, *arrivals: Arrival) -> list[str]:
    return [splitter.split(one).key for one in arrivals]


def refused(document: object) -> list[tuple[str, int | None]]:
    with pytest.raises(InvalidDocumentError) as caught:
        load_splitter(json.dumps(document))
    return [(problem.path, problem.column) for problem in caught.value.problems]


class TestRules:
    def test_rules_of_the_seed_append_names_in_turn_headers_and_paths(self):
        rules = splitter(SEED)
        assert [rules.preview(arrival("queue-static")).key for _ in range(2)] == ["queue-static-A"] * 2
        assert keys(rules, *[arrival("queue-static")] * 5) == [f"queue-static-{name}" for name in "ABCDA"]
        by_header = arrival("queue-header-test", **{"x-rp-deviceid": "A1B2C3D4"})
        by_path = arrival("queue-path-test", "/a/path1/path2/path3")
        assert keys(rules, by_header, by_path) == ["queue-header-test+A1B2C3D4", "queue-path-test_path2"]

    def test_expression_matches_the_whole_key_and_the_first_rule_takes_its_own_turn(self):
        rules = splitter({"a+": {"postfixFromStatic": ["1", "2"]}, "a.*": {"postfixFromStatic": ["3", "4"]}})
        assert keys(rules, *map(arrival, ("aa", "ab", "ba", "a"))) == ["aa-1", "ab-3", "ba", "a-2"]

    def test_every_group_of_the_path_is_appended_and_the_header_last(self):
        rules = splitter({"k": {"postfixFromRequest": {"header": "h", "url": "/(a)/(b)?(.*)"}}})
        found = keys(rules, arrival("k", "/a/c", h="x"), arrival("k", "/a/b", h=""), arrival("k", "x/a/c", h="x"))
        assert found == ["k-a--c-x", "k-a-b--", "k"]

    @pytest.mark.parametrize("lacking", [{}, {"h": None}, {"h": ["list"]}], ids=["missing", "null", "list"])
    @pytest.mark.parametrize("kind", [{"postfixFromRequest": {"header": "h", "url": "/(.*)"}},
                                      {"postfixFromHash": {"header": "h", "buckets": 3}}])  # fmt: skip
    def test_key_without_the_header_stays_as_it_is(self, kind, lacking):
        split = splitter({"k": kind}).split(arrival("k", "/a", **lacking))
        assert split.key == "k"
        assert "header h" in (split.unchanged or "")

    def test_header_is_found_in_any_case_and_type(self):
        rules = splitter({"k": {"postfixFromRequest": {"header": "X-Id"}}})
        found = keys(rules, arrival("k", "", **{"x-ID": bytearray(b"a")}), arrival("k", "", **{"x-id": 7}))
        assert found == ["k-a", "k-7"]

    @given(st.text(), st.integers(1, 50))
    def test_hash_gives_one_entity_one_bucket_and_never_changes(self, value, buckets):
        rules = {"k": {"postfixFromHash": {"header": "h", "buckets": buckets}}}
        [found] = keys(splitter(rules), arrival("k", h=value))
        assert [found] == keys(splitter(rules), arrival("k", h=value))
        assert 0 <= int(found.removeprefix("k-")) < buckets
        many = splitter({"k": {"postfixFromHash": {"header": "h", "buckets": 1000}}})
        assert keys(many, arrival("k", h="a"), arrival("k", h="é")) == ["k-912", "k-653"]

    @given(st.integers(1, 50), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=200))
    def test_another_bucket_takes_entities_from_all_and_moves_no_other(self, buckets, values):
        for value in values:
            assert jump_hash(value, buckets + 1) in {jump_hash(value, buckets), buckets}

    def test_key_is_data(self):
        rules = splitter({"(?s).*": {"postfixDelimiter": "", "postfixFromStatic": ["+"]}})
        assert keys(rules, *map(arrival, ODD_KEYS.values())) == [f"{key}+" for key in ODD_KEYS.values()]

    def test_expression_that_would_backtrack_exponentially_takes_no_time(self):
        rules = splitter({"(a+)+b": {"postfixFromStatic": ["1"]}, "k": {"postfixFromRequest": {"url": "(.*)*x(.*)*y"}}})
        assert keys(rules, arrival("a" * 250), arrival("k", "x" * 100_000)) == ["a" * 250, "k"]

    @pytest.mark.parametrize("value", ["x" * 260, "\udcff"], ids=["long", "not UTF-8"])
    def test_invalid_key_is_reported_with_what_made_it(self, value):
        request = arrival("k", h=value)
        split = splitter({"k": {"postfixFromRequest": {"header": "h"}}}).split(request)
        with pytest.raises(InvalidKeyError, match="After the splitter"):
            split_arrival(request, split).check_key()


class TestManifest:
    def test_document_loads_again_to_the_same_rules(self):
        manifest = load_splitter(SEED.rstrip() + ', "h": {"postfixFromHash": {"header": "x", "buckets": 2}}')
        again = load_splitter(json.dumps(manifest.document()))
        assert again.document() == manifest.document()
        assert list(again.document()) == ["queue-static", "queue-header-[a-z]+", "queue-path-[a-z]+", "h"]

    @pytest.mark.parametrize(
        ("rule", "place"),
        [
            ({}, ""),
            ({"postfixFromStatic": ["a"], "postfixFromHash": {"header": "h", "buckets": 2}}, ""),
            ({"postfixFromStatic": []}, ".postfixFromStatic"),
            ({"postfixFromStatic": ["a", "a"]}, ".postfixFromStatic"),
            ({"postfixFromStatic": ["a", 1]}, ".postfixFromStatic"),
            ({"postfixFromStatic": [""]}, ".postfixFromStatic"),
            ({"postfixFromStatic": "a"}, ".postfixFromStatic"),
            ({"postfixFromStatic": ["a"], "postfixDelimiter": 1}, ".postfixDelimiter"),
            ({"postfixFromStatic": ["a"], "extra": 1}, ".extra"),
            ({"postfixFromRequest": {}}, ".postfixFromRequest"),
            ({"postfixFromRequest": {"header": ""}}, ".postfixFromRequest.header"),
            ({"postfixFromRequest": {"header": "h", "path": "x"}}, ".postfixFromRequest.path"),
            ({"postfixFromHash": {"header": "h"}}, ".postfixFromHash.buckets"),
            ({"postfixFromHash": {"buckets": 2}}, ".postfixFromHash.header"),
            ({"postfixFromHash": {"header": "h", "buckets": 0}}, ".postfixFromHash.buckets"),
            ({"postfixFromHash": {"header": "h", "buckets": True}}, ".postfixFromHash.buckets"),
            (3, ""),
        ],
    )
    def test_wrong_rule_is_refused_at_its_place(self, rule, place):
        assert refused({"k": rule, "other": {"postfixFromStatic": ["x"]}}) == [(f"k{place}", None)]

    def test_every_error_is_reported_with_the_columns_of_expressions(self):
        wrong = {"a(": {"postfixFromStatic": ["x"]}, "b": {"postfixFromRequest": {"url": "/a/[z"}}, "a(?=b)": 1}
        assert refused(wrong) == [("a(", 1), ("b.postfixFromRequest.url", 4), ("a(?=b)", 2), ("a(?=b)", None)]

    @pytest.mark.parametrize("expression", ["((a{100}){100}){100}", "a" * 1001, "\\1", "(?<=x)a"])
    def test_expression_that_could_take_long_is_refused(self, expression):
        assert [path for path, _ in refused({expression: {"postfixFromStatic": ["x"]}})] == [expression]

    @pytest.mark.parametrize("document", ["[]", "3", "null", "{", "a: [", '{"a": ' * 5_000])
    def test_text_that_is_not_an_object_is_refused(self, document):
        with pytest.raises(InvalidDocumentError):
            load_splitter(document)

    def test_expression_that_captures_nothing_is_warned_of(self):
        [warning] = load_splitter('"k": {"postfixFromRequest": {"url": "/a"}}').warnings
        assert warning.path == "k.postfixFromRequest.url"


def warned(*expressions: str) -> list[str]:
    rules = {expression: {"postfixFromStatic": ["x"]} for expression in expressions}
    return [str(problem) for problem in load_splitter(json.dumps(rules)).warnings]


class TestOverlaps:
    def test_rules_that_match_one_key_are_warned_of_with_the_key_and_the_search_is_bounded(self):
        [warning] = warned("queue-[a-z]+", "other", "queue-.*-x", "queue-static")
        assert warning.startswith("queue-static: ")
        assert "'queue-[a-z]+'" in warning and "'queue-static'" in warning
        assert len(warned("queue-[a-z]+", "queue-[a-c]", "queue-.*")) == 3
        assert load_splitter(SEED).warnings == ()
        assert [text.partition(": ")[0] for text in warned("(?i)a", "b")] == ["(?i)a"]
        assert "cannot determine" in " ".join(warned(*[f"(.*a){{{number}}}.*b" for number in range(20, 40)]))

    ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "\\d", "\\w", "(a|bc)", "(?:b|)", "7"])
    COUNTS = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "{0}", "{2,}", "*?"])
    EXPRESSIONS = st.lists(st.tuples(ATOMS, COUNTS).map("".join), max_size=4).map("".join)

    @given(EXPRESSIONS, EXPRESSIONS, st.text("abc7", max_size=6))
    def test_common_text_is_matched_by_both_and_found_where_there_is_one(self, first, second, text):
        def both(text):
            return all(re2.fullmatch(expression, text) for expression in (first, second))

        found = common_text(Automaton(first), Automaton(second), SearchBudget(1_000_000))
        assert both(text) <= (found is not None)
        assert found is None or both(found)


class TestExplanation:
    def explained(self, rules: object, key: str, **headers: object) -> list[str]:
        request = sample_arrival(key, "/sql", headers=headers, body=None, app_id=None, timeout=None, now=0.0)
        explanation = explain(request, None, splitter=splitter(rules), names=PoolNames("p"), limits=LIMITS)
        return [step.text for step in explanation.steps] + [str(explanation.refused), explanation.split.key]

    def test_step_names_rule_and_key_and_what_follows_is_about_that_key(self):
        explanation = self.explained(SEED, "queue-static")
        [by_rule] = [text for text in explanation if "rule 'queue-static'" in text]
        assert "'queue-static-A'" in by_rule
        assert any("group 'queue-static-A'" in text for text in explanation)
        assert explanation[-1] == "queue-static-A"

    def test_invalid_key_is_explained_as_refused(self):
        explanation = self.explained(SEED, "queue-header-a", **{"x-rp-deviceid": "x" * 250})
        assert explanation[-2] == "invalid"
