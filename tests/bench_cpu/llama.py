"""Times llama.cpp: run by an interpreter that has llama-cpp-python, with a request on stdin.

The request is JSON: gguf, ids, threads, flash, batch, end (tokens to prefill), limit_s, decode (how
many tokens are decoded at several depths). The answer, JSON on stdout: version, system, batches
[[start, tokens, seconds]] and decode [[position, seconds]].
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Prefills until `end`, or until `limit_s` seconds are over, and decodes at several depths."""
    import llama_cpp

    job = json.load(sys.stdin)
    model = llama_cpp.Llama(
        job["gguf"],
        n_ctx=job["end"] + 256,
        n_batch=job["batch"],
        n_ubatch=job["batch"],
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        flash_attn=job["flash"],
        verbose=False,
    )
    model.eval(job["ids"][:64])  # reads the weights
    model.reset()
    begun = time.perf_counter()
    batches: list[tuple[int, int, float]] = []
    decode: list[tuple[int, float]] = []
    depths = [job["end"] // 32 * 2**step for step in range(6)]
    at = 0
    while at < job["end"] and time.perf_counter() - begun < job["limit_s"]:
        ids = job["ids"][at : min(at + job["batch"], job["end"])]
        start = time.perf_counter()
        model.eval(ids)
        batches.append((at, len(ids), time.perf_counter() - start))
        at += len(ids)
        if at in depths:
            for _ in range(job["decode"]):
                start = time.perf_counter()
                model.eval([ids[0]])
                decode.append((at, time.perf_counter() - start))
            model.n_tokens = at  # the next `eval` takes those tokens back
    system = llama_cpp.llama_print_system_info().decode()
    json.dump(
        {
            "version": llama_cpp.__version__,
            "system": system,
            "batches": batches,
            "decode": decode,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
