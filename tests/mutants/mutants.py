"""Faults planted in the kernel, and the tests that must find each of them.

A mutant is one change of one place: the name of what goes wrong, code that its file has once, and what it becomes.
"""

from dataclasses import dataclass

PLAN = "osrdyne/pool/queues/plan.py"
LOOP = "osrdyne/pool/queues/loop.py"
WORKERS_PLAN = "osrdyne/pool/workers/plan.py"
SAFE_DELETE = "osrdyne/broker/queues/safe_delete.py"
FORWARDER = "osrdyne/processors/requests/forwarder.py"
TOKEN_CODE = "osrdyne/broker/leadership/token.py"
PROCESSOR = "workers/osrdyne_worker/requests/processor.py"
INTAKE = "workers/osrdyne_worker/requests/intake.py"
PLAN_GUARD = "workers/osrdyne_worker/pipelines/guard/plan_guard.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`name`: what goes wrong. `old` occurs once in `file`, and becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


TESTS = {
    PLAN: "unit/pool/test_pool_planning component/pool/test_request_queues_loop",
    LOOP: "component/pool/test_request_queues_loop component/lifecycle/test_unsafe_variants",
    SAFE_DELETE: "unit/broker/test_probe_decisions component/pool/test_request_queues_loop "
    "component/lifecycle/test_unsafe_variants",
    FORWARDER: "component/processors/test_delivery_attempts component/processors/test_orphans "
    "component/processors/test_ingress component/processors/test_ingress_splitting "
    "component/processors/test_ingress_order component/processors/test_error_boundary "
    "component/lifecycle/test_unsafe_variants component/lifecycle/test_histories",
    TOKEN_CODE: "component/broker/test_token_channel component/broker/test_leader_session "
    "integration/test_leader_token component/daemon/test_takeover",
    WORKERS_PLAN: "unit/pool/test_pool_planning unit/pool/test_pool_workers component/pool/test_worker_groups",
    INTAKE: "component/worker/test_worker_priorities component/worker/test_worker_processor",
    PROCESSOR: "component/worker/test_worker_processor component/worker/test_worker_suspects "
    "component/worker/test_worker_deadlines component/worker/test_whole_worker component/worker/test_rates_of_events "
    "component/worker/test_data_versions security/test_forged_messages",
    PLAN_GUARD: "unit/worker/pipelines/test_plan_guard",
}
"""By file, the tests that find its faults, the quickest first. Those of `security` are of the tier `process`."""
FAULTS = {
    PLAN: [
        (
            "a queue that was never bound in this term is not unbound",
            "if queue.binding is not Binding.UNBOUND or queue.unbound_at is None:",
            "if queue.binding is Binding.BOUND:",
        ),
        ("the settle time is left out", "if now < queue.unbound_at + settle_delay:", "if now < queue.unbound_at:"),
        ("a queue with workers is deleted", "    if not workers.is_empty:\n", "    if False:\n"),
        (
            "a queue is bound while its worker is stopped",
            "QueueStep.WAIT_FOR_STOP if workers.stopping else QueueStep.BIND",
            "QueueStep.BIND",
        ),
        (
            "a total from before the end of the workers counts as evidence",
            "return max(settled, workers.empty_since)",
            "return min(settled, workers.empty_since)",
        ),
        (
            "a queue with messages is deleted",
            "return QueueStep.KEEP if messages else QueueStep.DELETE",
            "return QueueStep.DELETE",
        ),
    ],
    LOOP: [
        (
            "a queue counts as bound before bind-ok",
            "                await self._queue_commands.bind(key)\n                now = self._clock.monotonic()\n",
            "                self._queue_status.update(key, binding=Binding.BOUND, unbound_at=None)\n"
            "                await self._queue_commands.bind(key)\n                now = self._clock.monotonic()\n",
        ),
        (
            "a queue counts as bound until unbind-ok",
            "self._queue_status.update(key, binding=Binding.UNKNOWN, unbound_at=None, unverified=False)\n"
            "                await self._queue_commands.unbind(key)",
            "await self._queue_commands.unbind(key)",
        ),
        (
            "a group whose queue holds requests is not required again",
            "            self._tracker.require_worker_group(key)  # requests are in it: serve them",
            "            pass",
        ),
        (
            "a listed queue counts as bound",
            "            self._queue_status.update(key, exists=True, binding=Binding.UNKNOWN, unbound_at=None)\n\n"
            "    def note_missing",
            "            self._queue_status.update(key, exists=True, binding=Binding.BOUND, unbound_at=None)\n\n"
            "    def note_missing",
        ),
    ],
    SAFE_DELETE: [
        ("a ready message is overlooked", "if info.ready > 0:", "if info.ready > 1:"),
        ("a consumer is overlooked", "if info.consumers > 0:", "if info.consumers > 1:"),
        (
            "a delivery to the probe is overlooked",
            "if deliveries or first.ready or second.ready:",
            "if first.ready or second.ready:",
        ),
        (
            "one answer of a queue without a leader is enough",
            "if first == second == PROBE_ALONE:",
            "if second == PROBE_ALONE:",
        ),
        ("what the probe received is dropped", "        await give_back(delivery)\n", ""),
    ],
    FORWARDER: [
        ("a request does not hold its group", "                self._tracker.hold(one.key)\n", ""),
        (
            "a request is acknowledged before its copies are confirmed",
            "                    refused = await publishing\n",
            "                    refused = None\n",
        ),
        (
            "the group is released before its request is published",
            "        held = list(routed)\n",
            "        held: list[RoutedRequest] = []\n        self._release(routed)\n",
        ),
        (
            "a request is published to a queue that is not bound",
            "            if not self._queue_status[routed.key].is_bound:\n                # Never longer",
            "            if False:\n                # Never longer",
        ),
        (
            "a request waits for its bind beyond its deadline",
            "routed.deadline.at_ms, self._clock)",
            "routed.deadline.at_ms * 2, self._clock)",
        ),
        (
            "an unexpected error loses the request",
            " or refusal is FAILED:\n                await self._dead_letter(orphan.delivery)",
            " or refusal is FAILED:\n                await self._acknowledge(orphan.delivery)",
        ),
        ("a full queue answers nothing", "                    return FULL\n", "                    return None\n"),
        ("requests behind one that failed overtake it", "                ticket.hold_back()\n", ""),
        (
            "a publish without a confirm is not marked as a possible duplicate",
            "                    maybe_delivered = True\n",
            "",
        ),
    ],
    TOKEN_CODE: [
        (
            "any message of the leader queue counts as the renewed token",
            "if awaited is not None and self._is_message(delivery, awaited[0]):",
            "if awaited is not None:",
        ),
        ("the next term has the number of the last one", "own = Token(1 + _last_used(", "own = Token(_last_used("),
        (
            "a token of another user is believed",
            "if token is None or (self.user is not None and delivery.properties.user_id != self.user):",
            "if token is None:",
        ),
        (
            "a term ahead of the clock is believed",
            "return token if is_plausible_term(token.term, now=limit) else None",
            "return token",
        ),
        ("a new leader does not wait for an earlier one", "        await self._clock.sleep(self._times.silence)\n", ""),
        (
            "a command after the loss of the token is sent",
            "return self._lost or self._channel.is_closed or (self._consumer is not None and self._consumer.ended)",
            "return False",
        ),
        (
            "the lease counts from the answer",
            "        self._led_at = sent_at\n        for command in batch:",
            "        self._led_at = self._clock.monotonic()\n        for command in batch:",
        ),
    ],
    WORKERS_PLAN: [
        (
            "a worker of a key without a group is left alone",
            'return actions + [Stop(instance.instance_id, "the group is not desired") for instance in running]',
            "return actions",
        ),
        (
            "a worker is started in a slot that is not free",
            "taken = {instance.slot for instance in observed.instances}",
            "taken = {instance.slot for instance in staying}",
        ),
        (
            "a worker is started before its queue exists",
            "if not observed.queue_exists or (observed.is_ending and slots):",
            "if observed.is_ending and slots:",
        ),
        (
            "the back-off of a start is left out",
            "if observed.back_off_until is not None and now < observed.back_off_until:",
            "if False:",
        ),
    ],
    INTAKE: [
        (
            "a request that arrives after the stop runs",
            "await intake._processor.return_unused(delivery, intake._broker)\n                continue\n",
            "pass\n",
        ),
        (
            "requests that have not begun are kept by a stopped intake",
            "        self._processor.requeue(channel=channel)\n",
            "",
        ),
    ],
    PROCESSOR: [
        (
            "a suspect runs beside other requests",
            "await (self._run_alone(job) if job.is_suspect else self._run_in_slot(job))",
            "await self._run_in_slot(job)",
        ),
        (
            "the deadline of a request is not armed",
            "        if result is None and left is not None:\n            self._arm(job, left)",
            "        if False:\n            self._arm(job, left)",
        ),
        (
            "an answer goes to an address that is not allowed",
            "        reason = self._addresses.refuse(request.reply_to)\n",
            "        reason = None\n",
        ),
        (
            "a failed delivery is not counted",
            "                await job.reject()\n",
            "                await job.nack()\n",
        ),
        (
            "the caller's cancel is ignored",
            "early_result(interruption=job.interruption, was_cancelled=was_cancelled, left=left)",
            "early_result(interruption=job.interruption, was_cancelled=False, left=left)",
        ),
    ],
    PLAN_GUARD: [
        (
            "a query may name a view of another key",
            "if name[0].lower() not in views and name[0].lower() not in common:",
            "if False:",
        ),
        (
            "a function that reads data is allowed",
            "if not isinstance(parts, list) or len(parts) != 1 or name not in allowed:",
            "if not isinstance(parts, list) or len(parts) != 1:",
        ),
        (
            "an expression that runs code is allowed",
            'if package.split(".")[0] == "expressions" and name not in _FORBIDDEN_EXPRESSIONS:',
            'if package.split(".")[0] == "expressions":',
        ),
        (
            "the analysed plan may have a view of another key",
            'if _short_class(node) == "View" and node.get("ours") is not True:',
            "if False:",
        ),
        ("a node that is null is not refused", '        if node["nulls"]:\n', "        if False:\n"),
    ],
}
MUTANTS = [
    Mutant(name, file, old, new, tuple(f"tests/{test}.py" for test in TESTS[file].split()))
    for file, faults in FAULTS.items()
    for name, old, new in faults
]
