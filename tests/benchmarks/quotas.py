"""What a decision of the quotas costs with 100,000 principals, and what a principal weighs. There is no floor."""

import time
import tracemalloc

from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.ingress.quotas.document import QuotaManifest, load_quotas
from osrdyne.ingress.quotas.quotas import Quotas, Sent
from osrdyne.ingress.quotas.window import Moment
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure

PRINCIPALS = 100_000
DECISIONS = 20_000
ROUNDS = 11
DOCUMENT = """
pool: {messages_per_day: 100000000, share: principal}
rules: [{name: each, per: principal, messages_per_day: 1000000, send_rate: 1000, burst: 100000}]
"""


async def run(_: EmbeddedBroker) -> list[Figure]:
    manifest = load_quotas(DOCUMENT)
    quotas = filled(manifest)
    rounds = [Round(0.0, decisions(quotas, number)) for number in range(ROUNDS)]
    return [
        figure("quotas, decision and count", "µs", rounds, Goal(20, Comparison.DIFFERENCE)),
        figure("quotas, weight of a counter", "bytes", [Round(0.0, weight())], Goal(100, Comparison.DIFFERENCE)),
    ]


def filled(manifest: QuotaManifest) -> Quotas:
    quotas = Quotas(manifest, Moment(0.0, 0.0))
    for number in range(PRINCIPALS):
        quotas.charge(Sent("key", f"principal-{number}", 100), Moment(0.0, 0.0))
    return quotas


def decisions(quotas: Quotas, number: int) -> float:
    """Microseconds of processor time for each request that passes both meters."""
    sent = [Sent("key", f"principal-{(7919 * at + number) % PRINCIPALS}", 100) for at in range(DECISIONS)]
    began = time.process_time()
    for one in sent:
        now = Moment(float(number), float(number))
        if quotas.decide(one, now) is None:
            quotas.charge(one, now)
    return (time.process_time() - began) / DECISIONS * 1e6


def weight() -> float:
    """Bytes of memory for each counter of a meter with names."""
    tracemalloc.start()
    manifest = load_quotas("pool: {messages_per_day: 100000000, share: principal}")
    before = tracemalloc.get_traced_memory()[0]
    quotas = filled(manifest)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert quotas.usage(Moment(0.0, 0.0)).meters[0].names == PRINCIPALS
    return (after - before) / PRINCIPALS
