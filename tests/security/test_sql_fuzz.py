"""A short run of the fuzzer on the queries of this repository; `make fuzz-sql` is the long one."""

from fuzz.sql_fuzz import Fuzzer, own_seeds


def test_what_the_plan_check_accepts_reads_only_the_views_of_the_key(tpch_call, tmp_path):
    views = [view.name for view in tpch_call.context.state.views()]
    session = tpch_call.context.session
    fuzzer = Fuzzer(session, views, own_seeds(), tmp_path, seed=20)
    try:
        outcome = fuzzer.run(300, execute=1.0)
    finally:
        fuzzer.close()
        session.catalog.dropTempView("hidden")
        session.catalog.dropGlobalTempView("hidden")
    assert outcome.violations == []
    assert outcome.counts["texts"] == 300
    assert outcome.counts["accepted by the plan check"] == outcome.counts["run"] > 5
    assert sum(count for what, count in outcome.counts.items() if what.startswith("refused")) > 20
