"""Real data that is on every machine: two photographs that scikit-learn ships and Python's own source text."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ebbtide.errors import EbbtideError

CROP_CLASSES = 8
"""Labels of crops: two photographs times four quadrants in which the centre of the crop lies."""
BYTE_VALUES = 256


def photo_crops(batch: int, side: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Random crops of two photographs, and which photograph and quadrant each is from.

    Args:
        batch: number of crops.
        side: height and width of a crop, pixels; at most 427.
        seed: the same seed gives the same crops.

    Returns:
        Images ``(batch, 3, side, side)``, float32 in [-1, 1], in channels-last layout; labels ``(batch,)`` below
        `CROP_CLASSES`.

    Raises:
        EbbtideError: if scikit-learn, which ships the photographs, or Pillow, which reads them, is not installed.
    """
    photos = _photos()
    numbers = np.random.default_rng(seed)
    images = np.empty((batch, side, side, 3), dtype=np.float32)
    labels = np.empty(batch, dtype=np.int64)
    for index in range(batch):
        which = int(numbers.integers(len(photos)))
        height, width, _ = photos[which].shape
        top = int(numbers.integers(height - side + 1))
        left = int(numbers.integers(width - side + 1))
        images[index] = photos[which][top : top + side, left : left + side].astype(np.float32) / 127.5 - 1
        quadrant = 2 * (2 * top + side > height) + (2 * left + side > width)
        labels[index] = 4 * which + quadrant
    # The permuted view of an array in height-width-channel order is what PyTorch calls channels-last.
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)


def source_text(batch: int, length: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Random passages of the Python standard library's sources, as bytes, and the same shifted by one.

    Args:
        batch: number of passages.
        length: of a passage, bytes.
        seed: the same seed and Python version give the same passages.

    Returns:
        Bytes ``(batch, length)`` and the bytes that follow each, both int64 below `BYTE_VALUES`.
    """
    text = _standard_library()
    starts = np.random.default_rng(seed).integers(len(text) - length, size=batch)
    passages = torch.from_numpy(np.stack([text[start : start + length + 1] for start in starts]).astype(np.int64))
    return passages[:, :-1].contiguous(), passages[:, 1:].contiguous()


@functools.cache
def _photos() -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    try:
        from sklearn.datasets import load_sample_images

        photos = load_sample_images().images
    except ImportError as fault:
        raise EbbtideError(
            "the demo's photographs come with scikit-learn and are read with Pillow, one of which is missing: "
            "`pip install '.[demo]'` in a clone of ebbtide"
        ) from fault
    return [np.asarray(photo, dtype=np.uint8) for photo in photos]


@functools.cache
def _standard_library() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), dtype=np.uint8)
