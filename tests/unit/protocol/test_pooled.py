"""What the leader and a pooled process exchange survives the wire; hostile input is an error that names the field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_environments import SECRET, worker_environment

from osrdyne.errors import InvalidMessageError
from osrdyne.protocol.activity import ActivityReport, Event, report_from_wire
from osrdyne.protocol.control import Command, ControlMessage, Generation, control_from_wire
from osrdyne.protocol.environment import Placement, WorkerEnvironment
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.protocol.pooled import (
    PROCESS_KEY,
    Assign,
    Assignment,
    AssignmentExit,
    AssignmentState,
    Drain,
    Forget,
    ProcessMemory,
    ProcessState,
    Question,
    Refusal,
    Release,
    ReportState,
    process_state_of,
    question_of_control,
    question_to_control,
)
from osrdyne.testing.keys import ODD_KEYS

IDS = st.text(min_size=1, max_size=20)
WORKER_IDS = IDS.map(WorkerId)
KEYS = (st.text(max_size=40) | st.sampled_from(list(ODD_KEYS.values()))).map(Key)
COUNTS = st.integers(0, 2**53)
SECONDS = st.floats(0, 1e12)
BYTES = st.none() | COUNTS
GENERATIONS = st.builds(Generation, COUNTS, COUNTS)
EXITS = st.builds(AssignmentExit, st.none() | st.integers(0, 255), st.none() | st.text())
LINES = st.lists(st.text(), max_size=3).map(tuple)
ASSIGNMENTS = st.builds(
    Assignment, WORKER_IDS, KEYS, COUNTS, st.text(), SECONDS, GENERATIONS, st.sampled_from(AssignmentState),
    st.none() | EXITS, LINES, COUNTS, SECONDS,
)  # fmt: skip
REFUSALS = st.builds(Refusal, WORKER_IDS, st.none() | WORKER_IDS, st.text())
STATES = st.builds(
    ProcessState, COUNTS, COUNTS, st.lists(IDS, max_size=3).map(tuple), st.booleans(), st.booleans(),
    st.lists(ASSIGNMENTS, max_size=3).map(tuple), st.lists(REFUSALS, max_size=3).map(tuple),
    st.builds(ProcessMemory, BYTES, BYTES, BYTES, BYTES), COUNTS, SECONDS,
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["id", "worker", "worker_id", "grace", "sequence", "answers", "assignments", "refused", "memory", "key", "slot"]
)


QUESTIONS: st.SearchStrategy[Question] = (
    st.builds(Assign, IDS, st.builds(worker_environment, IDS, KEYS), COUNTS, st.text(), SECONDS)
    | st.builds(Release, IDS, WORKER_IDS, SECONDS)
    | st.builds(Forget, IDS, WORKER_IDS)
    | st.builds(ReportState, IDS)
    | st.builds(Drain, IDS)
)


class TestQuestions:
    @given(QUESTIONS, GENERATIONS)
    def test_question_that_was_sent_is_read(self, question, generation):
        received = control_from_wire(question_to_control(question, generation).wire_body())
        assert received is not None
        assert received.generation == generation
        assert question_of_control(received) == question

    @given(st.sampled_from(list(Command)), st.dictionaries(FIELDS, JSON, max_size=5))
    def test_any_details_are_a_question_or_an_error(self, command, details):
        try:
            question_of_control(ControlMessage(command, Generation(1, 1), details))
        except InvalidMessageError as error:
            assert error.message.startswith(f"{command}.")

    @pytest.mark.parametrize(
        ("change", "place"),
        [
            ({"worker_id": "w2"}, "assign.worker: "),
            ({"key": "other"}, "assign.worker: "),
            ({"slot": -1}, "assign.worker.slot: "),
            ({"started_at": float("nan")}, "assign.worker.started_at: "),
            ({"variables": {"WORKER_ID": "w1", "WORKER_KEY": "k"}}, "WORKER_AMQP_URI "),
            ({"variables": {"WORKER_AMQP_URI_FILE": "/etc/shadow"}}, "WORKER_AMQP_URI_FILE "),
            ({"variables": {"WORKER_AMQP_URI": [SECRET]}}, "assign.worker.variables.WORKER_AMQP_URI: "),
        ],
    )
    def test_error_names_the_field_and_no_value(self, change, place):
        question = Assign("q", worker_environment(), 0, "h", 1.0)
        message = question_to_control(question, Generation(1, 1))
        assert SECRET in message.wire_body().decode()
        assert SECRET not in repr(message) + repr(question)
        document = json.loads(message.wire_body())
        document["worker"] |= change
        received = control_from_wire(json.dumps(document).encode())
        assert received is not None
        with pytest.raises(InvalidMessageError, match=place) as raised:
            question_of_control(received)
        context = "" if raised.value.__suppress_context__ else str(raised.value.__context__)
        assert SECRET not in repr(raised.value) + context

    def test_command_to_a_worker_is_no_question_and_a_drain_needs_no_id(self):
        assert question_of_control(ControlMessage(Command.DRAIN, Generation(1, 1))) == Drain("")
        for command in (Command.PAUSE, Command.RESUME, Command.CANCEL, Command.QUEUES, Command.POISON):
            assert question_of_control(ControlMessage(command, Generation(1, 1), {"id": "q"})) is None


class TestState:
    @given(STATES)
    def test_state_that_was_sent_is_read(self, state):
        sent = state.to_report(WorkerId("process"))
        received = report_from_wire(routing_key=PROCESS_KEY, headers=sent.wire_headers(), body=sent.wire_body())
        assert received is not None
        assert (received.event, received.worker_id) == (Event.PROCESS_STATE, "process")
        assert process_state_of(received) == state

    @given(st.dictionaries(FIELDS, JSON, max_size=6))
    def test_any_details_are_a_state_or_an_error(self, details):
        try:
            process_state_of(ActivityReport("pooled", Event.PROCESS_STATE, "p", details))
        except InvalidMessageError as error:
            assert error.message.startswith("process-state")

    def test_error_names_the_place_and_fields_of_a_later_version_are_ignored(self):
        later = ActivityReport("pooled", Event.PROCESS_STATE, "p", {"sequence": 1, "weather": "fine"})
        assert process_state_of(later) == ProcessState(1)
        details = {"sequence": 1, "assignments": [{"worker_id": "w", "key": "k", "slot": 0}]}
        with pytest.raises(InvalidMessageError, match=r"process-state\.assignments\.0\.spec_hash: "):
            process_state_of(ActivityReport("pooled", Event.PROCESS_STATE, "p", details))

    def test_later_report_of_a_process_is_newer_also_after_a_restart(self):
        first, second = ProcessState(1, started_at=5.0), ProcessState(2, started_at=5.0)
        restarted = ProcessState(1, started_at=6.0)
        assert second.is_newer_than(first)
        assert restarted.is_newer_than(second)
        assert not first.is_newer_than(first)
        assert not second.is_newer_than(restarted)


class TestEnvironment:
    def test_process_has_no_request_queue(self):
        assert "WORKER_PLACEMENT" not in worker_environment().to_variables()
        process = worker_environment(key=PROCESS_KEY, requests_queues=(), placement=Placement.POOLED)
        variables = process.to_variables()
        assert variables["WORKER_PLACEMENT"] == "pooled"
        assert "WORKER_REQUESTS_QUEUE" not in variables
        assert WorkerEnvironment.from_variables(variables) == process
        del variables["WORKER_REQUESTS_QUEUES"]
        assert WorkerEnvironment.from_variables(variables) == process
