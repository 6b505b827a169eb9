"""A short run of the fuzzer on the queries of this repository; `make fuzz-sql` is the long one."""

from __future__ import annotations

from pathlib import Path

from fuzz.sql_fuzz import Fuzzer, own_seeds

from osrdyne_worker import Call


def test_what_the_plan_check_accepts_reads_only_the_views_of_the_key(tpch_call: Call, tmp_path: Path) -> None:
    views = [view.name for view in tpch_call.context.state.views()]
    session = tpch_call.context.session
    fuzzer = Fuzzer(session, views, own_seeds(), tmp_path, seed=20)
    try:
        outcome = fuzzer.run(600, execute=1.0)
    finally:
        fuzzer.close()
        session.catalog.dropTempView("hidden")
        session.catalog.dropGlobalTempView("hidden")
    assert outcome.violations == []
    counts = outcome.counts
    # What Spark cannot read or analyse is no attack: it counts neither as refused nor as accepted.
    harmless = counts["not read by Spark"] + counts["not analysed by Spark"]
    refused = sum(count for what, count in counts.items() if what.startswith("refused as"))
    assert harmless + refused + counts["accepted by the plan check"] == counts["texts"] == 600
    assert refused > 100
    assert counts["accepted by the plan check"] == counts["run"] > 10
