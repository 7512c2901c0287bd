"""The last stage: the drafter on disk, in z-lab's layout, with what it was made from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from safetensors import SafetensorError

from flashdraft.errors import TrainingError
from flashdraft.models.drafter.loading import save_drafter
from flashdraft.models.drafter.model import Drafter
from flashdraft.train.data.answers import fingerprint
from flashdraft.train.export import provenance, write_provenance
from flashdraft.train.fit.loop import LogRow
from flashdraft.train.fit.plot import LOG_NAME
from flashdraft.train.job import TrainingJob
from flashdraft.train.stages.material import Material


def refuse_worse(job: TrainingJob, before: LogRow | None, results: LogRow) -> None:
    """Raise where the drafter came out worse than the one it was made from, on what both ran."""
    name = "accepted_length"
    if before is None or results.get(name, before[name]) >= before[name]:
        return
    raise TrainingError(
        f"The drafter's accepted length on the held-out answers is {results[name]:.3f}, that of "
        f"{job.init_from}, which it was made from, {before[name]:.3f}: it is worse, and was not "
        f"written. Use {job.init_from} on, or train longer, with a lower --lr, or on more answers; "
        f"the run's states are in {job.out / 'run'}."
    )


def write_result(
    job: TrainingJob,
    material: Material,
    drafter: Drafter,
    results: LogRow,
    before: LogRow | None = None,
) -> dict[str, Any]:
    """Write the trained drafter and its provenance; return the latter, and where they are.

    `before` is what the drafter it was made from reached on the same held-out answers.
    """
    folder = job.out / "drafter"
    origin = None
    if job.init_from is not None:
        origin = {"name": material.origin, "fingerprint": fingerprint(job.init_from)}
    recipe = {
        "init_from": origin,
        "train": asdict(job.train),
        "answering": None if job.answers else asdict(job.answering),
    }
    data = {
        "sha256": material.digest,
        "num_answers": len(material.answers),
        "answer_tokens": material.answers.num_answer_tokens,
        "held_out": len(material.held_out),
        "sources": list(material.answers.source_names),
    }
    target = {**material.target, "dtype": material.dtype, **material.formats._asdict()}
    record = provenance(target=target, data=[data], recipe=recipe, held_out=results)
    try:
        save_drafter(drafter, folder)
        write_provenance(folder, record)
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"The drafter cannot be written to {folder}: {error}. The run's last state is kept;"
            " make room and run the same command again."
        ) from None
    log = str(job.out / "run" / LOG_NAME)
    return {"drafter": str(folder), "log": log, **record, "before": before}
