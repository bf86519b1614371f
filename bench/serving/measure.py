"""The measurement: which request goes to which server, in which order.

Servers take turns request by request, and who is first and who follows whom changes, so that a
slower minute of the machine meets all of them. May not know how servers are started nor what
ratios are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.serving.client import Client
from bench.serving.fit import Fitted, fit
from bench.serving.presets import CellPlan, LoadPlan, Preset
from bench.serving.records import EXACT_ONLY, OURS, Cell, Load, Sample
from bench.serving.workloads import WORKLOADS
from bench.serving.writer import Tokens, Vocabulary, Writer
from bench.turns import turn_order
from radix_rope.config import RadixRopeConfig

Progress = Callable[[str], None]

_WARM_REQUESTS = 3
"""The first few of a kind are slower, though everything is compiled after one."""


class Measurement:
    """One run of a preset over running servers.

    progress: called once for every step of `steps`.
    """

    def __init__(
        self,
        preset: Preset,
        vocabulary: Vocabulary,
        config: RadixRopeConfig,
        seed: int,
        progress: Progress,
    ) -> None:
        """Make every workload at once, so that a size that cannot be made fails before the wait."""
        self._preset = preset
        self._progress = progress
        self._seed = seed
        self._writers = [Writer(vocabulary, seed * 1000 + i) for i in range(len(preset.cells))]
        self._cells = [
            (plan, writer, _fitted(plan, writer, plan.requests, config, sequential=True))
            for plan, writer in zip(preset.cells, self._writers, strict=True)
        ]
        self._loads: list[tuple[LoadPlan, Fitted]] = []
        for i, plan in enumerate(preset.loads):
            writer = Writer(vocabulary, seed * 1000 + 500 + i)
            # No prompt is sent twice: a server whose cache can't be emptied would know it.
            requests = plan.requests * plan.bursts * len(plan.rates)
            fitted = _fitted(plan, writer, requests, config, sequential=False)
            self._loads.append((plan, fitted))
        first = preset.cells[0]
        self._warm_writer = Writer(vocabulary, seed * 1000 + 999)
        self._warm = _fitted(first, self._warm_writer, _WARM_REQUESTS, config, sequential=False)

    def steps(self, servers: int) -> int:
        """How often `progress` will be called; stock's `RadixCache` is one of the servers."""
        left_out = sum(not plan.radix_cache_requests for plan in self._preset.cells)
        cells = servers * len(self._cells) - left_out
        bursts = (servers - 1) * sum(len(plan.rates) * plan.bursts for plan, _ in self._loads)
        return servers + cells + bursts

    @property
    def cache_tokens(self) -> int:
        """Slots with which no server evicts anything within a cell."""
        cells = [
            _tokens(fitted.episode.donors)
            + _tokens(fitted.episode.requests)
            + plan.requests * plan.controls * fitted.expected[0].computed_tokens
            for plan, _, fitted in self._cells
        ]
        # Between two rates the caches are emptied.
        loads = [
            _tokens(fitted.episode.donors)
            + _tokens(fitted.episode.requests) // len(plan.rates)
            + plan.requests * plan.bursts * plan.output_tokens
            for plan, fitted in self._loads
        ]
        return max(cells + loads)

    def warm_up(self, clients: Sequence[Client]) -> None:
        """Once everything that is compiled or allocated on first use, of each kind of request."""
        episode = self._warm.episode
        for client in clients:
            for prompt in (
                *episode.donors,
                *episode.requests,
                *(self._warm.control(self._warm_writer, i, 0) for i in range(_WARM_REQUESTS)),
            ):
                client.one(prompt, output_tokens=2)
            self._progress(f"{client.name}: warm")

    def one_by_one(self, clients: Sequence[Client], found: list[Cell]) -> None:
        """All cells, one request at a time.

        found: each is added when it was measured, so that those before a failure are kept.
        """
        few = _without_radix_cache(clients)
        for plan, writer, fitted in self._cells:
            chosen = clients if plan.radix_cache_requests else few
            found.append(self._cell(chosen, plan, writer, fitted))

    def under_load(self, clients: Sequence[Client], found: list[Load]) -> None:
        """All bursts, one server at a time; servers take turns. found: as in `one_by_one`."""
        clients = _without_radix_cache(clients)
        for turn, (plan, fitted) in enumerate(self._loads):
            for place, rate in enumerate(plan.rates):
                for client in clients:
                    self._fill(client, fitted)
                for burst in range(plan.bursts):
                    first = (place * plan.bursts + burst) * plan.requests
                    prompts = fitted.episode.requests[first : first + plan.requests]
                    for client in turn_order(clients, turn + burst):
                        found.append(self._load(client, plan, prompts, rate, burst))

    def _cell(
        self, clients: Sequence[Client], plan: CellPlan, writer: Writer, fitted: Fitted
    ) -> Cell:
        workload = WORKLOADS[plan.workload]
        for client in clients:
            self._fill(client, fitted)
            self._progress(f"{workload.title}, {plan.size.prompt_tokens:,}: {client.name}")
        samples: list[Sample] = []

        def send(client: Client, prompt: Tokens, shifted: bool, request: int, repeat: int) -> None:
            samples.append(
                Sample(
                    server=client.name,
                    shifted=shifted,
                    request=request,
                    repeat=repeat,
                    expected_computed_tokens=fitted.expected[request].computed_tokens,
                    answer=client.one(prompt),
                )
            )

        for i, prompt in enumerate(fitted.episode.requests):
            for client in turn_order(clients, i):
                if i in _asked(client, plan):
                    send(client, prompt, True, i, 0)
            for repeat in range(plan.controls):
                control = fitted.control(writer, i, repeat)
                for client in turn_order(clients, i * plan.controls + repeat):
                    send(client, control, False, i, repeat)
        return Cell(
            workload=plan.workload,
            title=workload.title,
            prompt_tokens=plan.size.prompt_tokens,
            reusable_percent=plan.size.reusable_percent,
            samples=tuple(samples),
        )

    def _load(
        self, client: Client, plan: LoadPlan, prompts: Sequence[Tokens], rate: float, number: int
    ) -> Load:
        burst = client.burst(prompts, rate, plan.output_tokens, self._seed + number)
        title = WORKLOADS[plan.workload].title
        self._progress(f"{title} at {rate:g} requests/s: {client.name}")
        return Load(
            workload=plan.workload,
            title=title,
            prompt_tokens=plan.size.prompt_tokens,
            reusable_percent=plan.size.reusable_percent,
            rate=rate,
            burst=number,
            server=client.name,
            metrics=burst.metrics,
            answers=burst.answers,
        )

    def _fill(self, client: Client, fitted: Fitted) -> None:
        client.flush()
        for donor in fitted.episode.donors:
            client.one(donor)


def _fitted(
    plan: CellPlan | LoadPlan,
    writer: Writer,
    requests: int,
    config: RadixRopeConfig,
    *,
    sequential: bool,
) -> Fitted:
    workload = WORKLOADS[plan.workload]
    return fit(workload, writer, plan.size, requests, config, sequential=sequential)


def _asked(client: Client, plan: CellPlan) -> set[int]:
    """The shifted requests a server gets: spread, for the later turns of a session are longer."""
    count = {OURS: plan.requests, EXACT_ONLY: plan.radix_cache_requests}.get(
        client.name, plan.stock_requests
    )
    return {(2 * k + 1) * plan.requests // (2 * count) for k in range(count)}


def _without_radix_cache(clients: Sequence[Client]) -> Sequence[Client]:
    return [client for client in clients if client.name != EXACT_ONLY]


def _tokens(prompts: Sequence[Tokens]) -> int:
    return sum(map(len, prompts))
