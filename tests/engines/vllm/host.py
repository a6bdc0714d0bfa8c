"""A process that runs engines one after the other, by commands in lines of JSON, and answers with
lines of JSON: vLLM is imported once, and every engine starts with empty caches.

    {"what": "generate", "engine": {...}, "prompts": [[1, 2, 3], ...]}
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from typing import Any


def generate(
    engine: dict[str, Any],
    prompts: list[list[int]],
    max_tokens: int = 48,
    prompt_logprobs: int | None = None,
    between: list[list[Any]] | None = None,
) -> dict[str, Any]:
    """Greedy answers to prompts, one after the other; the number of cached tokens of each; and
    metrics. With ``between``, calls of methods of the engine, the prompts are sent twice, before
    and after these calls, and the second answers are returned."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = engine.pop("kv_transfer_config", None)
    # Processes to freeze or kill after the engine has started: a store that is unreachable at the
    # start is refused.
    hangs, dies = engine.pop("hang", None), engine.pop("kill", None)
    usual = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 4, "block_size": 32}
    model = LLM(
        disable_log_stats=False,
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
        **usual | engine,
    )
    try:
        if hangs is not None:
            os.kill(hangs, signal.SIGSTOP)
        if dies is not None:
            os.kill(dies, signal.SIGKILL)
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs)
        if between is not None:
            for prompt in prompts:
                model.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
            for method, arguments in between:
                getattr(model, method)(**arguments)
        told = []
        for prompt in prompts:
            answer = model.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
            output = answer.outputs[0]
            told.append(
                {
                    "tokens": list(output.token_ids),
                    "cached": answer.num_cached_tokens,
                    "finish": output.finish_reason,
                }
            )
        metrics: dict[str, Any] = {}
        for metric in model.get_metrics():
            if hasattr(metric, "value") and ("external" in metric.name or "terrace" in metric.name):
                labels = {name: value for name, value in metric.labels.items() if name not in ("engine", "model_name")}
                metrics[metric.name + (json.dumps(labels, sort_keys=True) if labels else "")] = metric.value
        return {"answers": told, "metrics": metrics}
    finally:
        model.llm_engine.engine_core.shutdown()
        del model
        gc.collect()


def main() -> None:
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            told = {"generate": generate}[asked.pop("what")](**asked)
        except BaseException as error:
            traceback.print_exc()
            # An engine that failed to start leaves its worker's connector behind, which the next
            # one in this process would use: pages would go to the memory of the former engine.
            from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

            ensure_kv_transfer_shutdown()
            told = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main()
