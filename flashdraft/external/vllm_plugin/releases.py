"""What is known of each vLLM release: the one table that `serve` and the plugin read.

On a release outside of it `serve` says so and uses the newest one's flags, if it is not too old for
block drafters, and the plugin stays out. It imports nothing, so that vLLM's processes can.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """A release that has block drafters, and what the plugin does in it."""

    scales_drafters: bool  # the drafter's architecture gets our class; read in its sources
    mends_cpu: bool  # the CPU's kernels are reached the way that cpu.py mends


RELEASES = {
    "0.26": Release(scales_drafters=False, mends_cpu=False),
    "0.27": Release(scales_drafters=False, mends_cpu=False),
    "0.28": Release(scales_drafters=True, mends_cpu=False),
    "0.29": Release(scales_drafters=True, mends_cpu=False),
    "0.30": Release(scales_drafters=True, mends_cpu=False),
    "0.31": Release(scales_drafters=True, mends_cpu=True),
    "0.32": Release(scales_drafters=True, mends_cpu=True),
}
OLDEST = next(iter(RELEASES))
TRIED = "0.32.0"  # run by us, on a CPU; the flags are its own
SCALED = tuple(name for name, release in RELEASES.items() if release.scales_drafters)
MENDED = tuple(name for name, release in RELEASES.items() if release.mends_cpu)


def find_release(version: str) -> Release:
    """What is known of `0.32.0+cpu`; of a release outside of the table, that nothing is done."""
    return RELEASES.get(".".join(version.split(".")[:2]), Release(False, False))
