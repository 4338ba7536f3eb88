"""Does a GEMM that is run in pieces of its tokens give the same bits?

A region that is longer than its window could be rebuilt piece by piece, if every piece gave the bits
that the whole gives. BLAS libraries choose a kernel by the shape and promise no such thing. This prints,
for some shapes and numbers of pieces, how many elements of the output differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

SHAPES = ((512, 512, 1536), (1000, 768, 2304), (2048, 1024, 4096), (32, 64, 256))
PIECES = (2, 3, 4, 8, 16)


def differing(shape: tuple[int, int, int], pieces: int, dtype: torch.dtype, device: str) -> int:
    """Elements that differ where [tokens, in] x [in, out] is run in so many pieces."""
    tokens, inner, outer = shape
    torch.manual_seed(0)
    rows = torch.randn(tokens, inner, dtype=dtype, device=device)
    weight = torch.randn(outer, inner, dtype=dtype, device=device)
    whole = torch.nn.functional.linear(rows, weight)
    parts = torch.cat([torch.nn.functional.linear(part, weight) for part in rows.chunk(pieces)])
    return int((whole != parts).sum())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    device = parser.parse_args(arguments).device
    print(f"torch {torch.__version__}, {device}; elements that differ, by number of pieces")
    print(f"{'dtype':<10} {'tokens x in x out':<20} " + " ".join(f"{n:>8}" for n in PIECES))
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            counts = [differing(shape, n, dtype, device) for n in PIECES]
            name = " x ".join(map(str, shape))
            print(
                f"{str(dtype).removeprefix('torch.'):<10} {name:<20} " + " ".join(f"{n:>8}" for n in counts)
            )


if __name__ == "__main__":
    main()
