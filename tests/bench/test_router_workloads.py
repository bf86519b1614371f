"""What the router workloads promise: shared blocks, other places, waves of distinct groups."""

from bench.router.workloads import Size, workloads

SIZE = Size(groups=4, members=3, block=90, unique=20, window=3, wave=2)


def windows(prompt: tuple[int, ...], width: int = 16) -> set[tuple[int, ...]]:
    return {prompt[i : i + width] for i in range(len(prompt) - width + 1)}


def test_groups_share_content_and_waves_do_not() -> None:
    made = workloads(5, SIZE)
    assert made == workloads(5, SIZE) != workloads(6, SIZE)
    assert [workload.key for workload in made] == ["prefix", "shifted", "documents", "sessions"]
    for workload in made:
        assert [len(wave) for wave in workload.waves] == [2] * 6
        for one, other in workload.waves:
            assert not windows(one) & windows(other)
        prompts = [prompt for wave in workload.waves for prompt in wave]
        for prompt in prompts:
            relatives = [one for one in prompts if windows(one) & windows(prompt)]
            assert len(relatives) == SIZE.members
            if workload.key == "prefix":
                assert len({one[: SIZE.block] for one in relatives}) == 1
            if workload.key == "shifted":
                assert len({one[0] for one in relatives}) == SIZE.members


def test_workloads_and_seeds_have_nothing_in_common() -> None:
    seen: set[tuple[int, ...]] = set()
    for workload in (*workloads(5, SIZE), *workloads(6, SIZE)):
        now = {window for wave in workload.waves for prompt in wave for window in windows(prompt)}
        assert not now & seen
        seen |= now
