"""Runs inside vLLM's environment: greedy answers of a pair, and every block the drafter filled.

    python record_drafts.py JOB.json OUT.json

JOB: target, drafter, prompts (lists of token ids), max_tokens, options for vllm.LLM. OUT: for each
prompt its answer, and for each draft the anchor, its position, and the logits of the masked slots.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


class Recorder:
    """Mixed into vLLM's worker, where the drafter lives; called through `collective_rpc`."""

    model_runner: Any

    def begin_recording(self) -> str:
        model = self.model_runner.drafter.model
        self._blocks: list[dict[str, Any]] = []
        compute_logits = model.compute_logits

        def before_forward(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            self._blocks.append(
                {"anchor": int(kwargs["input_ids"][0]), "position": int(kwargs["positions"][0])}
            )

        def record(hidden: Any) -> Any:
            logits = compute_logits(hidden)
            self._blocks[-1]["logits"] = logits.float().tolist()
            return logits

        model.register_forward_pre_hook(before_forward, with_kwargs=True)
        model.compute_logits = record
        return f"{type(model).__module__}.{type(model).__qualname__}"

    def take_recording(self) -> list[dict[str, Any]]:
        blocks, self._blocks = self._blocks, []
        return blocks


def main(job_path: str, out_path: str) -> None:
    from vllm import LLM, SamplingParams  # not at the top: the worker imports this module too

    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    llm = LLM(
        job["target"],
        speculative_config={
            "method": "dflash",
            "model": job["drafter"],
            "num_speculative_tokens": job["num_draft_tokens"],
        },
        worker_extension_cls=f"{Path(__file__).stem}.Recorder",
        skip_tokenizer_init=True,
        **job["options"],
    )
    [model_class] = llm.collective_rpc("begin_recording")
    params = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
    )
    cases = []
    for prompt in job["prompts"]:
        [answer] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        [blocks] = llm.collective_rpc("take_recording")
        cases.append({"answer": list(answer.outputs[0].token_ids), "blocks": blocks})
    Path(out_path).write_text(
        json.dumps({"model_class": model_class, "cases": cases}), encoding="utf-8"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
