"""What the kernel benchmarks share: timing, the printed table, the JSON lines, the widths of preset `1b`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Decoder transformer of ~1.14B parameters: width, feed-forward width, layers, vocabulary.
D, FF, LAYERS, VOCABULARY = 2048, 8192, 20, 32000


class Report:
    """Rows of one benchmark: printed as they come, written as JSON lines if asked."""

    def __init__(self, description: str) -> None:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--json", type=Path, help="also write one JSON object a row to this file")
        parser.add_argument("--quick", action="store_true", help="shorter measurements")
        self.options = parser.parse_args()
        if not torch.cuda.is_available():
            sys.exit("this benchmark needs a CUDA device")
        import triton

        self.environment = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        }
        self.rows: list[dict[str, Any]] = []
        print(description, self.environment, sep="\n")
        print(f"{'shape':<26} {'variant':<44} {'ms median [p20, p80]':<26} {'rate':>16} {'error':>9}")

    def measure(
        self,
        shape: str,
        variant: str,
        call: Callable[[], Any],
        *,
        flops: float = 0.0,
        nbytes: float = 0.0,
        error: Callable[[], float] | None = None,
        note: str = "",
    ) -> float:
        """Time `call`; a variant that fails is one line, and the script goes on. Returns the median in ms, or inf."""
        from triton.testing import do_bench

        try:
            deviation = None if error is None else error()
            rep = (3 if self.options.quick else 21) * do_bench(call, warmup=1, rep=1)  # as many calls, at least
            rep = max(rep, 30 if self.options.quick else 80)
            median, low, high = do_bench(call, warmup=20, rep=rep, quantiles=[0.5, 0.2, 0.8])
        except Exception as problem:
            reason = " ".join(f"{type(problem).__name__}: {problem}".split())[:150]
            print(f"{shape:<26} {variant:<44} FAILED {reason}", flush=True)
            self.rows.append({"shape": shape, "variant": variant, "failed": reason})
            return float("inf")
        rate = f"{flops / median / 1e9:.0f} TFLOP/s" if flops else f"{nbytes / median / 1e6:.0f} GB/s" if nbytes else ""
        shown = "" if deviation is None else f"{deviation:.1e}"
        times = f"{median:.4f} [{low:.4f}, {high:.4f}]"
        print(f"{shape:<26} {variant:<44} {times:<26} {rate:>16} {shown:>9} {note}", flush=True)
        self.rows.append(
            {
                "shape": shape,
                "variant": variant,
                "unit": "ms",
                "median": median,
                "p20": low,
                "p80": high,
                "flops": flops,
                "bytes": nbytes,
                "error": deviation,
                "note": note,
            }
        )
        return median

    def close(self) -> None:
        if self.options.json:
            lines = (json.dumps({**row, **self.environment}) for row in self.rows)
            self.options.json.write_text("\n".join(lines) + "\n")
            print(f"wrote {self.options.json}")


def host_ms(call: Callable[[], Any]) -> float:
    """Milliseconds one call costs the host, at best, with the device idle before it."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        best = min(best, 1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return best


def largest_relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """max |got - expected| / max |expected|."""
    return ((got.double() - expected).abs().max() / expected.abs().max()).item()
