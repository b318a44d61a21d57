"""A report as plain values: what `--json` prints and what the page is filled from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tsdoc.profile.results import (
    DecodeRun,
    FromDisk,
    Full,
    Kept,
    Kernel,
    PrefillResult,
    Report,
    Warm,
)


def report_json(report: Report) -> dict[str, Any]:
    """Returns every figure; what is derived from others stands beside them."""
    return {
        "model": report.model,
        "random_weights": report.random_weights,
        "source": report.source,
        "prompt_tokens": report.num_tokens,
        "command": report.command,
        "machine": asdict(report.machine),
        "device": report.device,
        "compute_dtype": report.compute_dtype,
        "kv_dtype": report.kv_dtype,
        "kv_bytes_per_token": report.kv_bytes_per_token,
        "selection": dict(report.selection),
        "theta": report.theta,
        "ceilings": asdict(report.ceilings),
        "first_token": {
            "cold_s": report.first_token_cold_s,
            "cold_stages_s": dict(report.cold_s),
            "warm": None if report.warm is None else _warm(report.warm),
            "from_disk": None if report.from_disk is None else _from_disk(report.from_disk),
        },
        "prefill": _prefill(report.prefill),
        "decode": [_decode(run) for run in report.decode],
        "theta_curve": [_decode(run) for run in report.theta_curve],
        "kernels": [_kernel(kernel) for kernel in report.kernels],
        "kv": None if report.kept is None else _kept(report.kept),
        "full_attention": None if report.full is None else _full(report.full),
        "sweeps": [asdict(row) for row in report.sweeps],
        "memory": {
            "host_peak_bytes": report.host_peak_bytes,
            "device_peak_bytes": report.device_peak_bytes,
        },
        "notes": list(report.notes),
    }


def _warm(warm: Warm) -> dict[str, Any]:
    return {
        "seconds": warm.first_token_s,
        "after_weights_s": warm.after_weights_s,
        "stages_s": dict(warm.stages_s),
    }


def _from_disk(found: FromDisk) -> dict[str, Any]:
    return {
        **_warm(found.start),
        "bytes": found.num_bytes,
        "disk_bytes_per_s": found.disk_bytes_per_s,
        "disk_ratio": found.ratio,
    }


def _prefill(prefill: PrefillResult) -> dict[str, Any]:
    return {
        "seconds": prefill.seconds,
        "tokens_per_s": prefill.tokens_per_s,
        "warm_up_s": prefill.warm_up_s,
        "block_tokens": prefill.block_tokens,
        "parts_s": dict(prefill.parts_s),
        "blocks": [asdict(block) for block in prefill.blocks],
    }


def _decode(run: DecodeRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "theta": run.theta,
        "first_token_s": run.first_token_s,
        "p50_ms": run.p50_ms,
        "p95_ms": run.p95_ms,
        "tokens_per_s": 1e3 / run.p50_ms,
        "lookups": run.lookups,
        "hits": run.hits,
        "hit_ratio": run.hit_ratio,
        "steps_ms": list(run.steps_ms),
    }


def _kernel(kernel: Kernel) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "phase": kernel.phase,
        "seconds": kernel.seconds,
        "bytes": kernel.num_bytes,
        "flops": kernel.num_flops,
        "floor_s": kernel.floor_s,
        "bound": kernel.bound,
        "roofline_ratio": kernel.share,
    }


def _kept(kept: Kept) -> dict[str, Any]:
    return {
        "bytes": kept.num_bytes,
        "write_s": kept.write_s,
        "bytes_per_s": kept.bytes_per_s,
        "disk_bytes_per_s": kept.disk_bytes_per_s,
        "disk_ratio": kept.ratio,
        "open_s": kept.open_s,
    }


def _full(full: Full) -> dict[str, Any]:
    return {
        "prefill_s": full.prefill_s,
        "decode_ms": full.decode_ms,
        "prefill_speedup": full.prefill_speedup,
        "decode_speedup": full.decode_speedup,
        "measured": full.measured,
        "method": full.method,
        "chunk_attention": [{"tokens": tokens, "ms": ms} for tokens, ms in full.samples],
    }
