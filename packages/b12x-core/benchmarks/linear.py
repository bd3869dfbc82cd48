"""Linear layers beside the peers that are importable, in one run: a table, and the record for `docs/performance/`.

python packages/b12x-core/benchmarks/linear.py --output docs/performance
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import linear_peers
import record
import torch
from b12x_core import FP8_ROW, NVFP4, SCHEMES, Scheme, prepare_linear
from b12x_core.ops._linear_kernel import call_for, multiply
from b12x_core.ops._quantize_kernel import quantize_rows
from b12x_core.ops._scratch import take
from b12x_core.ops.linear import LinearWeights, linear
from b12x_core.reference.quantize import dequantize_activation, quantize
from b12x_core.testing.weights import exact_weight, random_weight
from ceilings import Ceilings
from timing import copies, median_us, relative_error

SHAPES = ((5120, 17408), (34816, 5120), (2880, 2880), (4096, 14336))
TOKENS = (1, 4, 8, 16, 32, 64, 128, 512, 2048, 8192)
NAMES = ("bf16", "fp8-tensor", "fp8-channel", "fp8-block")
"""Schemes that peers have, too; `--schemes` takes any other."""


def static_scale(scheme: Scheme, x: torch.Tensor) -> torch.Tensor | None:
    """The input scale of fp8-tensor and the global one of nvfp4 activations, as a calibrated checkpoint has them."""
    largest = 448 * 6 if scheme.activation == NVFP4 else 448
    given = scheme.name == "fp8-tensor" or scheme.activation == NVFP4
    return (x.float().abs().amax() / largest).reshape(1) if given else None


class Problem:
    """A scheme and a shape, with as many copies of the weights as it takes to leave the L2 cache."""

    def __init__(self, name: str, n: int, k: int) -> None:
        self.name, self.n, self.k, self.scheme = name, n, k, SCHEMES[name]
        self.weight, self.scale = random_weight(self.scheme, n, k, torch.device("cuda"))
        self.bytes = self.scheme.weight.nbytes(n, k)
        self.count = copies(self.bytes)
        self.whole = torch.full((1,), 1 / (4 * k**0.5), device="cuda") if self.scheme.weight.global_scale else None
        self.dense = exact_weight(self.scheme, self.weight, self.scale, self.whole).float()

    def layers(self, input_scale: torch.Tensor | None) -> list[LinearWeights]:
        """Our copies."""
        return [
            prepare_linear(self.scheme, self.weight, self.scale, global_scale=self.whole, input_scale=input_scale)
            for _ in range(self.count)
        ]

    def rows(self, tokens: Sequence[int], ceilings: Ceilings) -> list[record.Row]:
        """A row for each number of tokens and, for quantized activations, each kind of input."""
        others = [linear_peers.Layer(self.name, self.weight.clone(), self.scale, self.whole) for _ in range(self.count)]
        fixed = torch.randn(256, self.k, device="cuda").bfloat16()
        input_scale = static_scale(self.scheme, fixed)
        ours = self.layers(input_scale)
        found = []
        for m in tokens:
            x = torch.randn(m, self.k, device="cuda").bfloat16()
            found += self.measure(m, x, ours, others, input_scale, ceilings)
        return found

    def measure(
        self,
        m: int,
        x: torch.Tensor,
        ours: list[LinearWeights],
        others: list[linear_peers.Layer],
        input_scale: torch.Tensor | None,
        ceilings: Ceilings,
    ) -> list[record.Row]:
        """The rows of one number of tokens."""
        fmt = self.scheme.activation
        seen, activation = x.float(), linear_peers.Activation(x, None, None)
        if fmt.quantized:
            q = quantize(x, fmt, input_scale)
            seen = dequantize_activation(q)
            scale = q.scale.view(-1, 1) if fmt == FP8_ROW else q.scale
            activation = linear_peers.Activation(x, q.data, scale)
        few = slice(0, 128)
        truth = seen[few] @ self.dense.t()
        error = relative_error(linear(x, ours[0])[few], truth)
        call = call_for(self.name, x.dtype, x.dtype, m, self.n, self.k, x.device)
        shape = {"m": m, "n": self.n, "k": self.k}
        calls: dict[str, list[linear_peers.Gemm]] = {}
        for layer in others:
            for name, gemm in linear_peers.gemms(layer, activation).items():
                calls.setdefault(name, []).append(gemm)
        peers: dict[str, float] = {}
        for name, gemms in calls.items():
            wanted = x[few].float() @ self.dense.t() if name.startswith(linear_peers.FROM_BF16) else truth
            wrong = relative_error(gemms[0]()[few][: truth.shape[0]], wanted)
            if wrong > 0.05:
                print(f"  {name}: error {wrong:.3f}, left out")
            else:
                peers[name] = median_us(gemms)
        quantizers = {
            name: median_us([quantizer]) for name, quantizer in linear_peers.quantizers(self.name, activation).items()
        }

        def make(us: float, theirs: dict[str, float], kind: str) -> record.Row:
            return record.Row(
                "linear",
                self.name,
                {**shape, "input": kind},
                us,
                self.bytes,
                2 * m * self.n * self.k,
                theirs,
                call.kernel,
                error,
                ceilings.floor_us(self.bytes),
                ceilings.mma_tflops("e4m3" if call.operands.activation == "e4m3" else "bf16"),
            )

        rows = []
        if fmt.quantized:
            data, x_scale = quantize_rows(x, fmt, input_scale, layout=call.operands.layout)
            y = torch.empty((m, self.n), dtype=x.dtype, device=x.device)
            counters, workspace, *_ = take(call.scratch, x.device)
            bound = [
                lambda w=w: multiply(  # type: ignore[misc]
                    data, x_scale, input_scale, w.weight, w.affine, w.scale, y, call, self.k, workspace, counters
                )
                for w in ours
            ]
            given = {name: us for name, us in peers.items() if not name.startswith(linear_peers.FROM_BF16)}
            rows.append(make(median_us(bound), given, str(fmt)))
        whole = [lambda w=w: linear(x, w) for w in ours]  # type: ignore[misc]
        with_quantizer = {
            f"{name} + {quantizer}": us + more for name, us in peers.items() for quantizer, more in quantizers.items()
        }
        rows.append(make(median_us(whole), with_quantizer or dict(peers), "bf16"))
        return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemes", nargs="*", default=list(NAMES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--shapes", nargs="*", default=[f"{n}x{k}" for n, k in SHAPES])
    parser.add_argument("--output", default=None, help="folder for the record")
    parser.add_argument("--name", default="linear", help="of the record")
    options = parser.parse_args()
    began = time.time()
    ceilings = Ceilings.measure()
    rows: list[record.Row] = []
    for name in options.schemes:
        for shape in options.shapes:
            n, k = map(int, shape.split("x"))
            found = Problem(name, n, k).rows(options.tokens, ceilings)
            for row in found:
                print(row.line(), flush=True)
            rows += found
            torch.cuda.empty_cache()
            if options.output:
                record.write(options.output, options.name, rows, ceilings)
    print(f"{len(rows)} rows in {time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
