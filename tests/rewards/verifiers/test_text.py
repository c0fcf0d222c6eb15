"""Exact match, patterns, JSON schemas."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.errors import RewardError
from hybridflow.rewards.verifiers import exact, json_schema, regex


@pytest.mark.parametrize(
    ("response", "answer", "options", "expected"),
    [
        ("Paris", "Paris", {}, 1),
        ("  paris\n", "Paris", {}, 1),
        ("paris", "Paris", {"ignore_case": False}, 0),
        ("New\u00a0 York", "new york", {}, 1),
        ("\uff11\uff12", "12", {}, 1),  # full-width digits
        ("STRASSE", "straße", {}, 1),
        ("Paris.", "Paris", {}, 0),
        ("Paris.", "Paris", {"ignore_punctuation": True}, 1),
        ("x = 3", "x=3", {}, 0),
        ("cat", ["dog", "Cat"], {}, 1),
        ("cow", ["dog", "Cat"], {}, 0),
        ("12", 12, {}, 1),
        ("I think.\nAnswer: no. Answer: yes", "yes", {"after": "Answer:"}, 1),
        ("yes", "yes", {"after": "Answer:"}, 0),
        ("", "x", {}, 0),
    ],
)
def test_exact(response: str, answer: object, options: dict, expected: int) -> None:
    assert exact.score("", response, answer=answer, **options)["score"] == expected


@given(st.text())
def test_normalising_twice_changes_nothing_more(text: str) -> None:
    for case in (True, False):
        once = exact.normalised(text, ignore_case=case, ignore_punctuation=False)
        assert " ".join(once.split()) == once
        assert exact.normalised(f" {text}\n", ignore_case=case, ignore_punctuation=False) == once


def test_exact_errors_name_the_row() -> None:
    with pytest.raises(RewardError, match=r"'gold'.*\['answer'\].*answer_key"):
        exact.score("", "x", answer_key="gold", answer="x")
    with pytest.raises(RewardError, match="dict"):
        exact.score("", "x", answer={})
    assert exact.score("", "no mark", answer="x", after="####") == {"score": 0.0, "unparsed": 1.0}


@pytest.mark.parametrize(
    ("response", "options", "expected"),
    [
        ("#### 7 ... #### 12", {"pattern": r"####\s*(\S+)"}, 1),  # the last match
        ("#### 12 ... #### 7", {"pattern": r"####\s*(\S+)"}, 0),
        ("<b>12</b>", {"pattern": r"<a>(.*?)</a>|<b>(.*?)</b>"}, 1),
        ("RESULT=12", {"pattern": r"result=(\d+)", "flags": "i"}, 1),
        ("RESULT=12", {"pattern": r"result=(\d+)"}, 0),
        ("value 12", {"pattern_key": "rule", "rule": r"value (\d+)"}, 1),
        ("<think>a\nb</think>12", {"pattern": r"^<think>.*</think>.+$", "flags": "s", "answer_key": None}, 1),
        ("12", {"pattern": r"^<think>", "answer_key": None}, 0),
    ],
)
def test_regex(response: str, options: dict, expected: int) -> None:
    assert regex.score("", response, **({"answer": "12"} | options))["score"] == expected


def test_regex_errors() -> None:
    for options, message in [
        ({}, "one of"), ({"pattern": "a", "pattern_key": "b"}, "one of"), ({"pattern": "("}, "no regular expression"),
        ({"pattern": "a"}, "no capture group"), ({"pattern": "(a)", "flags": "q"}, "unknown"), ({"pattern_key": "rule"}, "pattern_key"),
    ]:  # fmt: skip
        with pytest.raises(RewardError, match=message):
            regex.score("", "a", answer="a", **options)
    assert regex.score("", "nothing", answer="a", pattern="(x)") == {"score": 0.0, "unparsed": 1.0}


SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
GOOD = '{"name": "Ada", "age": 36}'


@pytest.mark.parametrize(
    ("response", "score", "unparsed"),
    [
        (GOOD, 1, 0),
        (f"Here you are:\n```json\n{GOOD}\n```\nAnything else?", 1, 0),
        (f'First {{"name": 1}}, no: {GOOD} is right', 1, 0),
        (f'{GOOD} and then {{"name": 1}}', 0, 0),  # the last one counts
        ('{"outer": ' + GOOD + "}", 0, 0),  # an inner object is no answer
        ('{"name": "Ada"}', 0, 0),
        ('{"name": "Ada", "age": 3.5}', 0, 0),
        (f"[{GOOD}]", 1, 0),  # contained
        ("{not json}", 0, 1),
        ('{"name": "Ada", "age": NaN}', 0, 1),
        ("", 0, 1),
        ('{"a":' * 50_000, 0, 1),
        ("{" * 100_000, 0, 1),
        ('{"name": "Ada", "age": ' + "9" * 10_000 + "}", 0, 1),
    ],
)
def test_json_schema(response: str, score: int, unparsed: int) -> None:
    result = json_schema.score("", response, schema_key="form", form=json.dumps(SCHEMA))
    assert (result["score"], result["unparsed"]) == (score, unparsed)
    assert result == json_schema.score("", response, schema=SCHEMA)


JSON_VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)


@given(st.dictionaries(st.text(), JSON_VALUES), st.text("ab \n:,."))
def test_object_is_found_in_any_prose(value: dict, prose: str) -> None:
    assert json_schema.find_object(f"{prose}{json.dumps(value)}{prose}") == value


def test_json_schema_errors() -> None:
    for options, message in [
        ({}, "schema_key"), ({"schema": {"type": 3}}, "not valid"), ({"schema": "{"}, "no JSON"), ({"schema": "[]"}, "list"),
        ({"schema": {"$ref": "https://example.com/other.json"}}, "not fetched"),
    ]:  # fmt: skip
        with pytest.raises(RewardError, match=message):
            json_schema.score("", GOOD, **options)
    assert json_schema.score("", '{"age": -1}', schema=SCHEMA)["violations"] == 2.0
