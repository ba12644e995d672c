"""The digest kernel on a GPU: what the host reads, and the time of a copy."""

from __future__ import annotations

import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bridges.proof import byte_digest  # noqa: E402
from bridges.proof.digest_kernel import BLOCK, STEPS, Region, Regions  # noqa: E402

SHAPES = [(torch.float8_e4m3fn, (4096, 4096)), (torch.float8_e4m3fn, (5,)), (torch.bfloat16, (3, 7)),
          (torch.float32, ()), (torch.float32, (BLOCK * STEPS + 5,)), (torch.bfloat16, (1000, 512))]


def raw(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    draw = np.random.default_rng(len(shape)).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(draw).view(dtype).reshape(shape)


def test_the_kernel_reads_what_the_host_reads():
    """Several types, rows that are no whole words, several programs, unsound scales; and again after a write,
    padded copies, too."""
    tensors = [raw(*each) for each in SHAPES] + [torch.tensor([1.0, 0.0, -1.0, float("inf"), float("nan")])]
    scales = [False] * len(SHAPES) + [True]
    there = [t.cuda() for t in tensors]
    read, want = byte_digest.reader(there, scales), byte_digest.reader(tensors, scales)
    np.testing.assert_array_equal(read(), want())
    assert read()[-1, 2] == 4
    for t in tensors + there:
        t.view(-1).view(torch.uint8)[1] ^= 64
    np.testing.assert_array_equal(read(), want())


def test_parts_add_up_to_the_whole():
    whole = raw(torch.bfloat16, (1000, 512))
    there, cut = whole.cuda(), ((0, 1000), (0, 512))
    parts = [((a, b), (c, d)) for a, b in ((0, 300), (300, 1000)) for c, d in ((0, 128), (128, 512))]
    found = Regions([Region(there[a:b, c:d].contiguous(), 0, byte_digest.place(((a, b), (c, d)), cut, 2))
                     for (a, b), (c, d) in parts]).read()
    want = byte_digest.digest_of(whole)
    np.testing.assert_array_equal(found.cpu().numpy().view(np.uint32)[0, :2], want)


def test_it_is_about_as_fast_as_a_copy():
    """Of 600 tensors of 3.2 MB together, as a publish has them; a copy reads and writes what this reads."""
    tensors = list(torch.empty((600, 1024, 3072), dtype=torch.uint8, device="cuda").random_())
    read = byte_digest.reader(tensors)
    target = torch.empty_like(tensors[0].new_empty(600 * 1024 * 3072))
    source = torch.empty_like(target)

    def seconds(call) -> float:
        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        return sorted(times)[3]

    kernel, copy = seconds(read), seconds(lambda: target.copy_(source))
    print(f"digests {kernel * 1e3:.2f} ms, a copy of the same bytes {copy * 1e3:.2f} ms")
    assert kernel < 3 * copy
