"""The CPU kernel: gather, rotate and scatter fused, over all layers, on several threads.

Owns the tables of addresses handed to `cpu_native` and the division of the work among
threads. It allocates nothing that grows with a row: only cosine and sine rows, one per
distinct distance.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from radix_rope.rotary import cpu_native as native
from radix_rope.rotary.pool import KVPoolView, geometry
from radix_rope.rotary.request import Move, MoveChecker
from radix_rope.rotary.spec import angle_table

_CODES = {
    torch.float32: native.FLOAT32,
    torch.float16: native.FLOAT16,
    torch.bfloat16: native.BFLOAT16,
    torch.float8_e4m3fn: native.FLOAT8_E4M3,
    torch.float8_e5m2: native.FLOAT8_E5M2,
}

# A piece of work below this many bytes is not worth waking another thread.
MIN_PIECE_BYTES = 1 << 18


class _Workers:
    """Threads shared by all correctors of a process; made anew after a fork.

    NOTE: numba's own parallel loops are not used. Its OpenMP layer aborts a forked child and
    its workqueue layer aborts when two threads enter at once, and both happen in a serving
    process. Plain threads around a kernel that releases the GIL have neither problem.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def get(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                size = max(1, (os.cpu_count() or 1) - 1)
                self._pool = ThreadPoolExecutor(size, thread_name_prefix="radix_rope_move")
                self._pid = os.getpid()
            return self._pool


_WORKERS = _Workers()


class CpuCorrector:
    """`Corrector` with compiled loops for pools in main memory."""

    name = "cpu"

    def __init__(self, pool: KVPoolView, rotate: bool = True) -> None:
        """Prepares to work in a pool, compiling or loading the kernel.

        Args:
            pool: the pool to work in, on the CPU.
            rotate: False copies keys unrotated (the counter-example of the demo).
        """
        self._pool = pool
        self._checker = MoveChecker(pool.num_slots, pool.device)
        self._code = _CODES[pool.dtype]
        self._frequencies: list[tuple[float, ...]] = []
        self._layers = self._describe_layers(pool, rotate)
        values = torch.arange(256, dtype=torch.uint8)
        self._decode = (
            values.view(pool.dtype).to(torch.float32).contiguous()
            if pool.dtype.itemsize == 1
            else torch.zeros(1)
        )
        # Compiles (or loads from numba's disk cache) without touching the pool.
        nothing = torch.zeros(0, dtype=torch.int64)
        self._move_pieces(Move(nothing, nothing, nothing, nothing), pieces=1)

    def _describe_layers(self, pool: KVPoolView, rotate: bool) -> npt.NDArray[np.int64]:
        layers = np.zeros((pool.num_layers, native.COLUMNS), dtype=np.int64)
        for index, (buffer, spec) in enumerate(zip(pool.k, pool.specs, strict=True)):
            record = layers[index]
            record[: native.V_BASE] = _addresses(buffer)
            if pool.v:
                record[native.V_BASE : native.PART_BYTES] = _addresses(pool.v[index])
            if not (rotate and spec.has_rope):
                continue
            # Rotated rows go head by head even where the copy is one piece.
            whole = geometry(buffer)
            item = buffer.element_size()
            record[native.K_HEADS] = whole.heads
            record[native.K_HEAD_BYTES] = whole.head_stride * item
            record[native.K_ROW_BYTES] = whole.head_dim * item
            record[native.PART_BYTES] = spec.rotary_offset * item
            record[native.HALF] = spec.rotary_dim // 2
            record[native.IS_NEOX] = int(spec.is_neox)
            if spec.inv_freq not in self._frequencies:
                self._frequencies.append(spec.inv_freq)
            record[native.TABLE] = self._frequencies.index(spec.inv_freq)
        return layers

    def move(self, src: torch.Tensor, dst: torch.Tensor, delta: torch.Tensor) -> None:
        """See `Corrector.move`."""
        move = self._checker.check(src, dst, delta)
        tokens = move.src.numel()
        if tokens == 0:
            return
        threads = torch.get_num_threads()
        most = tokens * self._pool.bytes_per_token // MIN_PIECE_BYTES
        # More pieces than threads, so that one slow core does not hold up the rest.
        pieces = 1 if threads == 1 else max(1, min(4 * threads, most))
        self._move_pieces(move, pieces, threads)

    def _move_pieces(self, move: Move, pieces: int, threads: int = 1) -> None:
        tables = [angle_table(f, move.deltas.numpy()) for f in self._frequencies]
        addresses = np.array(
            [[cos.ctypes.data, sin.ctypes.data] for cos, sin in tables], dtype=np.int64
        ).reshape(-1, 2)
        row = move.row.numpy()
        still = (move.deltas.numpy() == 0).astype(np.uint8)[row]
        total = self._pool.num_layers * row.size
        queue = iter(range(pieces))

        def work() -> None:
            # Threads take pieces from one iterator: `next` on it is atomic under the GIL.
            for piece in queue:
                native.move_range(
                    self._layers,
                    addresses,
                    self._decode.data_ptr(),
                    self._code,
                    move.src.numpy(),
                    move.dst.numpy(),
                    row,
                    still,
                    total * piece // pieces,
                    total * (piece + 1) // pieces,
                )

        helpers = min(threads, pieces) - 1
        futures = [_WORKERS.get().submit(work) for _ in range(helpers)]
        try:
            work()
        finally:
            for future in futures:
                future.result()


def _addresses(buffer: torch.Tensor) -> list[int]:
    """Base address, page tokens, byte strides and copy pieces of one buffer."""
    where, item = geometry(buffer), buffer.element_size()
    heads, row = where.heads, where.head_dim
    if where.packed:
        heads, row = 1, where.heads * where.head_dim
    return [
        buffer.data_ptr(),
        where.page_tokens,
        where.page_stride * item,
        where.token_stride * item,
        where.head_stride * item,
        heads,
        row * item,
    ]
