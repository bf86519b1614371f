"""The metrics without a server: what a batch that ran adds to them."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from radix_rope.integration import second_pass
from radix_rope.integration.fallbacks import Fallbacks
from radix_rope.integration.metrics import Metrics
from radix_rope.integration.request import state_of
from radix_rope.integration.reuse import BatchReuse

LABELS = {"model_name": "m", "tp_rank": "0"}


def test_prompt_tokens_are_counted_once_and_second_passes_beside_them() -> None:
    registry = prometheus_client.CollectorRegistry()
    kinds = SimpleNamespace(
        _counter_cls=partial(prometheus_client.Counter, registry=registry),
        _gauge_cls=partial(prometheus_client.Gauge, registry=registry),
        _histogram_cls=partial(prometheus_client.Histogram, registry=registry),
    )
    metrics = Metrics(LABELS, kinds, token_bytes=8, on_gpu=False)
    cache: Any = SimpleNamespace(fallbacks=Fallbacks(), content=None)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sglang:radix_rope_{name}", {**LABELS, **labels})

    assert value("recomputed_tokens_total") == 0
    for recomputed in (12, 0, 5):
        reuse = BatchReuse(cache, recomputed_tokens=recomputed)
        reuse.tokens.update(exact=5, shifted=70, computed=20)
        metrics.count_prefill(reuse)
    assert value("recomputed_tokens_total") == 17
    assert [value("prompt_tokens_total", source=s) for s in ("exact", "shifted", "computed")] == [
        15, 210, 60,
    ]  # fmt: skip


def test_a_batch_counts_what_its_second_pass_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `meta_info` does: a retracted request counts nothing."""
    reqs = [SimpleNamespace(retracted_stain=stain) for stain in (False, True)]
    rule = SimpleNamespace(watch=lambda *a: _Watching())
    cache: Any = SimpleNamespace(repair_rule=rule, max_rows=8, max_second_pass_tokens=None)
    plan = SimpleNamespace(options=SimpleNamespace(repair="attention"), runs=[object()])
    entries = [SimpleNamespace(index=i, req=req, plan=plan) for i, req in enumerate(reqs)]
    reuse = BatchReuse(cache, entries=entries)  # type: ignore[arg-type]
    forward: Any = SimpleNamespace(extend_seq_lens_cpu=[9, 9])
    intervals = {0: [(2, 4), (7, 9)], 1: [(1, 9)]}
    monkeypatch.setattr(second_pass, "second_rows", lambda *a: intervals)
    monkeypatch.setattr(second_pass, "second_batch", lambda *a: (forward, intervals))
    monkeypatch.setattr(second_pass, "split_rows", lambda *a: None)
    monkeypatch.setattr(second_pass, "wanted_tokens", lambda *a: [0, 0])
    kept = SimpleNamespace(put_into=lambda *a: None)
    monkeypatch.setattr(second_pass, "FirstResults", lambda *a: kept)
    output = SimpleNamespace(logits_output=None)
    second_pass.run_passes(lambda rows: output, forward, None, reuse, None)  # type: ignore[arg-type]
    assert reuse.recomputed_tokens == 4
    assert [state_of(req).recomputed_tokens for req in reqs] == [4, 0]


class _Watching:
    def __enter__(self) -> Any:
        return dict

    def __exit__(self, *error: Any) -> None:
        pass
