"""The condition language of routes: the cases of a file, and what holds for every text and every request."""

import encodings
import json
from pathlib import Path

import pytest
from case_tables import failures
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.ingress.conditions import UNDEFINED, Sample, compile_condition
from osrdyne.ingress.conditions.batch import evaluate_line
from osrdyne.ingress.conditions.compiler import Condition
from osrdyne.ingress.conditions.functions import FUNCTIONS
from osrdyne.ingress.conditions.parser import MAX_DEPTH
from osrdyne.ingress.conditions.samples import BodyNotParsedError
from osrdyne.ingress.conditions.tokens import MAX_LENGTH
from osrdyne.ingress.documents.problems import InvalidDocumentError

ROOT = Path(__file__).parents[3]
CASES = (ROOT / "tests" / "queries" / "routes_eval.jsonl").read_text(encoding="utf-8").splitlines()
SAMPLE = Sample({"word": "abc", "number": "3", "empty": None}, {"key": "plant=4"}, b"")
JSON = {"contentType": "application/json", "contentEncoding": "utf-8"}


def test_condition_gives_what_the_language_says():
    def check(line):
        assert evaluate_line(line) == json.loads(line)["expected"]

    assert failures(CASES, check) == {}


def test_every_function_has_a_case_and_is_documented():
    words = "\n".join(CASES).lower()
    page = (ROOT / "docs" / "reference" / "routes" / "conditions.md").read_text(encoding="utf-8")
    names = [*FUNCTIONS, "concat"]
    assert [name for name in names if f"{name}(" not in words or f"`{name}(" not in page] == []


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("nope(1 + 'a') = 1 OR abs('x') = 'y' + 2", [1, 8, 22, 37]),
        ("length(1) + 1 = 2 AND true", [1]),
        ("true" + " " * MAX_LENGTH, [MAX_LENGTH + 1]),
        (f"$body.a[{'1' * 4301}] = 1", [9]),
        *[(opening * 1000, None) for opening in ("(", "-", "NOT ", "abs(")],
    ],
    ids=["all errors of types", "one mistake", "length", "digits of an index", *["nesting"] * 4],
)
def test_every_error_is_reported_once_with_its_column(condition, expected):
    with pytest.raises(InvalidDocumentError) as caught:
        compile_condition(condition)
    columns = [problem.column for problem in caught.value.problems]
    assert columns == (expected or columns[:1])


def test_thousands_of_operands_are_neither_deep_nor_large():
    condition = compile_condition(" OR ".join(["word='no'"] * 1000) + " OR word='abc'")
    assert condition.evaluate(SAMPLE) is True
    condition = compile_condition("is_defined(" + "||".join(["a"] * 5000) + ")")
    assert condition.evaluate(Sample({"a": "x" * 1000}, {}, b"")) is False


@pytest.mark.parametrize(("word", "result"), [({"a": 1}, UNDEFINED), (bytearray(b"abc"), True)], ids=["table", "bytes"])
def test_header_of_bytes_is_a_string_and_a_table_is_undefined(word, result):
    assert compile_condition("word = 'abc'").evaluate(Sample({"word": word}, {}, b"")) is result


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (b'{"a": [{"b": 1}, {"b": 2.5}], "c": "x", "d": true}', True),
        (b'{"a": [{"b": 1}, {"b": 2}], "c": "x", "d": true}', False),
        (b'{"a": [1, NaN]}', UNDEFINED),
        (b"[" * 100_000, UNDEFINED),
        (b"\xff", UNDEFINED),
        (b'{"a": ' + b"9" * 100_000 + b"}", False),
    ],
    ids=["true", "false", "no JSON", "deep", "bytes", "long"],
)
def test_body_that_is_parsed_in_advance_has_the_same_values(body, result):
    condition = compile_condition("$body.a[1].b = 2.5 AND $body.a[0].b < 2 AND $body.c = 'x' AND $body.d")
    deferred, text = Sample({}, JSON, body), Sample({}, {"contentType": "text/plain"}, body)
    for sample in (deferred, text):
        sample.defer_parsing()
    assert condition.evaluate(text) is UNDEFINED
    with pytest.raises(BodyNotParsedError):
        condition.evaluate(deferred)
    deferred.parse()
    assert condition.evaluate(deferred) is condition.evaluate(Sample({}, JSON, body)) is result


@pytest.mark.parametrize(
    ("system", "body", "named"),
    [
        (JSON, b'{"a": 1}', None),
        ({"contentType": "application/json"}, b'{"a": 1}', "content encoding"),
        ({"contentType": "application/json", "contentEncoding": "gzip" * 9999}, b"{}", "content encoding"),
        ({"contentType": "application/json; charset=latin1"}, b"{}", "'latin1'"),
        ({"contentEncoding": "utf-8"}, b'{"a": 1}', "content type"),
        ({"contentType": "text/plain"}, b"", "'text/plain'"),
        (JSON, b"{", "no JSON"),
    ],
)
@pytest.mark.parametrize("deferred", [True, False])
def test_sample_names_why_its_body_was_not_read(system, body, named, deferred):
    sample = Sample({}, system, body)
    assert sample.unread_body is None
    if deferred:
        sample.parse()
    compile_condition("is_defined($body.a)").evaluate(sample)
    assert (sample.unread_body is None) is (named is None)
    assert (named or "") in (sample.unread_body or "")[:200]
    assert len(sample.unread_body or "") < 200


def too_costly(text: str) -> Condition:
    """A condition that is more work than one may be, if this text is long."""
    return compile_condition(" OR ".join(f"contains({text}, 'y{number}')" for number in range(400)))


def test_work_on_one_request_is_limited_and_counted_but_not_what_was_before_its_body_was_parsed():
    sample = Sample({"text": "x" * 2**20}, JSON, json.dumps({"text": "x" * 2**20}).encode())
    before, costly = too_costly("text"), too_costly("$body.text")
    cheap = compile_condition("starts_with($body.text, 'x')")
    sample.defer_parsing()
    for _ in range(100):
        before.evaluate(sample)
    sample.parse()
    assert (sample.exceeded, cheap.evaluate(sample)) == (0, True)
    assert (costly.evaluate(sample), sample.exceeded) == (UNDEFINED, 1)
    assert cheap.evaluate(sample) is True, "the next condition has its share"
    for _ in range(100):
        costly.evaluate(sample)
    assert cheap.evaluate(sample) is UNDEFINED, "the request has no more"


def test_repeated_part_is_evaluated_once():
    sample = Sample({"word": "x" * 2**20}, {}, b"")
    repeated = " OR ".join(f"length(LOWER(Word)) = {number}" for number in range(400))
    assert compile_condition(repeated + " OR length(lower(word)) = 1048576").evaluate(sample) is True
    assert sample.exceeded == 0


def test_names_of_encodings_are_not_kept():
    """Python's codec registry keeps each name that it is asked for, and these come from clients."""
    known = len(encodings._cache)
    for number in range(50):
        system = {"contentType": "application/json", "contentEncoding": f"unknown-{number}"}
        compile_condition("is_defined($body.a)").evaluate(Sample({}, system, b"{}"))
    assert len(encodings._cache) == known


def test_error_that_quotes_half_a_surrogate_pair_can_be_printed():
    answer = evaluate_line(json.dumps({"condition": "a \ud800 b"}))
    assert (answer["column"], bool(json.dumps(answer, ensure_ascii=False).encode())) == (3, True)


def test_line_that_is_not_a_case_is_an_error_with_a_column():
    lines = ["", "[]", "{}", "{", "[" * 99_999, '{"condition": "a", "system": 1}']
    lines += [f'{{"condition": {value}}}' for value in ("0", "1", "null", "false", "[]", "{}", '["a"]')]
    assert {line[:99]: set(evaluate_line(line)) for line in lines} == {line[:99]: {"error", "column"} for line in lines}


# --- what holds for everything

WORDS = [*FUNCTIONS, "concat", "word", "number", "empty", "missing", "$key", "{$key}", "$body.a[0].b", "true", "null"]
SYMBOLS = [
    "undefined", "'a'", "1", "0x1F", "1e999", "AND", "OR", "NOT", "??", "||", "=", "!=", "<", ">=", "+", "-", "%",
    "/", "*", "(", ")", ",", "/**/", "@", "'", "$", "{", "}", "==", "\\",
]  # fmt: skip


@given(st.lists(st.sampled_from(WORDS + SYMBOLS), max_size=12).map(" ".join) | st.text(max_size=40))
def test_any_text_is_a_condition_or_an_error_inside_it(text):
    try:
        result = compile_condition(text).evaluate(SAMPLE)
    except InvalidDocumentError as error:
        assert all(1 <= (problem.column or 0) <= len(text) + 1 for problem in error.problems)
    else:
        assert result in {True, False, UNDEFINED}


def joined(inner: st.SearchStrategy[str], operators: list[str]) -> st.SearchStrategy[str]:
    return st.tuples(inner, st.sampled_from(operators), inner).map(lambda parts: "({} {} {})".format(*parts))


def called(inner: st.SearchStrategy[str], names: list[str]) -> st.SearchStrategy[str]:
    return st.tuples(st.sampled_from(names), inner).map(lambda parts: "{}({})".format(*parts))


STRINGS = st.recursive(
    st.sampled_from(["'a'", "''", "word", "empty", "missing", "$key", "$body.a"]),
    lambda inner: joined(inner, ["||", "??"]) | called(inner, ["lower", "upper"]),
    max_leaves=4,
)
NUMBERS = st.recursive(
    st.sampled_from(["0", "1", "2.5", "1e308", "as_number(number)", "as_number(word)", "$body.a"]),
    lambda inner: joined(inner, ["+", "-", "*", "/", "%", "??"]) | called(inner, ["-", "exp", "sqrt", "floor", "sign"]),
    max_leaves=6,
)
TRUTHS = st.recursive(
    joined(STRINGS, ["=", "<", ">="])
    | joined(NUMBERS, ["=", "!=", ">"])
    | st.sampled_from(["true", "null", "undefined"]),
    lambda inner: joined(inner, ["AND", "OR"]) | called(inner, ["NOT "]),
    max_leaves=6,
)


@given(TRUTHS, TRUTHS)
def test_negation_turns_true_and_false_around_or_follows_its_sides_and_sharing_changes_nothing(text, other):
    result, also = [compile_condition(one).evaluate(SAMPLE) for one in (text, other)]
    opposite = {True: False, False: True, UNDEFINED: UNDEFINED}
    assert compile_condition(f"NOT ({text})").evaluate(SAMPLE) == opposite[result]
    assert compile_condition(f"({text}) AND ({text})").evaluate(SAMPLE) == result
    assert (compile_condition(f"{text} OR {other}").evaluate(SAMPLE) is True) == (True in {result, also})


@given(STRINGS, STRINGS)
def test_a_comparison_is_undefined_for_all_operators_or_for_none(left, right):
    results = [compile_condition(f"{left} {symbol} {right}").evaluate(SAMPLE) for symbol in ("=", "!=", "<", ">=")]
    assert len({result is UNDEFINED for result in results}) == 1


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("(", ")"), ("NOT ", ""), ("is_null(", ")"), ("undefined ?? false OR true AND true = (", ")")],
)
def test_deepest_nesting_that_is_allowed_evaluates(opening, closing):
    """Or the limit would not keep the stack from running out."""
    depth = MAX_DEPTH - 1
    condition = compile_condition(opening * depth + "true" + closing * depth)
    assert isinstance(condition.evaluate(SAMPLE), bool)
