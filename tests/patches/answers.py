"""Prints what a server without radix_rope answers, to the last bit; run in a process of its own."""

import json
import sys
from typing import Any


def main(model: str) -> None:
    """Print one JSON line: per request its tokens and all log probabilities."""
    import sglang

    engine = sglang.Engine(
        model_path=model,
        dtype="float32",
        attention_backend="torch_native",
        max_total_tokens=6000,
        disable_cuda_graph=True,
        sleep_on_idle=True,
        chunked_prefill_size=256,
        random_seed=1,
        log_level="error",
    )
    system = [(7 * i) % 40000 + 100 for i in range(300)]
    answers: list[dict[str, Any]] = []
    for batch in (
        [[*system, 11, 12, 13]],
        # A prefix hit, a request that shares nothing, and a hit at another length, together.
        [[*system, 21, 22, 23], [(11 * i) % 40000 + 100 for i in range(200)], [*system[:150], 31]],
        # The first again: a hit up to its last token.
        [[*system, 11, 12, 13]],
    ):
        answers += engine.generate(
            input_ids=batch,
            sampling_params={"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=[len(tokens) - 8 for tokens in batch],
            top_logprobs_num=[3] * len(batch),
        )
    kept = ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs", "cached_tokens")
    print(
        json.dumps(
            [
                {"tokens": answer["output_ids"], **{k: answer["meta_info"][k] for k in kept}}
                for answer in answers
            ]
        )
    )
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
