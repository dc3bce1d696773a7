"""`Image`: a picture that a loop logs, and its pixels as they are written. Start reading at `Image.read`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.text import a_type

__all__ = ["Image", "reduced"]

_CHANNELS = (1, 3, 4)
_TYPES = ("uint8", "bool", "float16", "float32", "float64")
_MOST_VALUES = 1 << 26
"""Of one image: 256 MiB while it is converted."""


class Image:
    """A picture for `trainer.log(samples=unisono.Image(pixels))`.

    Checked here, by type and shape; read where it is logged, and on rank 0 alone. So a tensor that changes in between
    is logged as it is then, and a GPU is waited for only there.

    Args:
        pixels: A tensor or NumPy array of shape H x W, H x W x C or C x H x W, or a picture of PIL. C is 1 (gray), 3
            (RGB) or 4 (RGB and opacity). uint8 is 0 to 255, floats are 0 to 1, bool is black and white. Floats outside
            are clipped, and NaN is black.
        caption: A text below it.
        layout: "HWC" or "CHW", for three dimensions of which both the first and the last could be channels. None: found
            from the shape.

    Raises:
        TypeError: `pixels` is something else, or of another dtype.
        ValueError: Its shape is none of these, fits both layouts, or has more than 2**26 values.

    >>> Image(torch.zeros(3, 20, 30)), Image(torch.zeros(20, 30, dtype=torch.uint8), caption="all black")
    (Image(30 x 20, 3 channels), Image(30 x 20, 1 channel, caption='all black'))
    """

    def __init__(self, pixels: Any, *, caption: str | None = None, layout: Literal["HWC", "CHW"] | None = None) -> None:
        if caption is not None and not isinstance(caption, str):
            raise TypeError(f"caption={caption!r} must be a text, and is {a_type(caption)}")
        if layout not in (None, "HWC", "CHW"):
            raise ValueError(f"layout={layout!r} must be 'HWC' or 'CHW', or None to find it from the shape")
        self.caption = caption
        self._pixels = pixels
        self._is_picture = _is_picture(pixels)
        if self._is_picture:
            (width, height), channels = pixels.size, len(_MODES.get(pixels.mode, "RGB"))
            self._has_channels_first = False
        else:
            _check_type(pixels)
            shape = tuple(pixels.shape)
            self._has_channels_first = _has_channels_first(shape, layout)
            channels, height, width = _sizes(shape, self._has_channels_first)
        self.height, self.width, self.channels = height, width, channels
        if not 0 < height * width * channels <= _MOST_VALUES:
            raise ValueError(
                f"unisono.Image: {width} x {height} x {channels} (width, height, channels) are "
                f"{height * width * channels:,} values; give an image of 1 to {_MOST_VALUES:,}"
            )

    def __repr__(self) -> str:
        told = "" if self.caption is None else f", caption={self.caption!r}"
        plural = "" if self.channels == 1 else "s"
        return f"Image({self.width} x {self.height}, {self.channels} channel{plural}{told})"

    def read(self) -> tuple[Tensor, float]:
        """Return the pixels as uint8 of shape [H, W, C] on the CPU, and how far the values are from 0 to 1 at most.

        The distance is 0.0 for integers. Waits for a GPU.
        """
        found = self._tensor()
        if found.dtype is torch.uint8:
            return found, 0.0
        if found.dtype is torch.bool:
            return found.to(torch.uint8) * 255, 0.0
        found = found.float().nan_to_num(nan=0.0, posinf=1.0, neginf=0.0)
        low, high = found.aminmax()
        outside = max(0.0, -float(low), float(high) - 1)
        return found.clamp(0, 1).mul(255).round().to(torch.uint8), outside

    def _tensor(self) -> Tensor:
        pixels = self._pixels
        if self._is_picture:
            mode = pixels.mode if pixels.mode in ("L", "RGB", "RGBA") else _MODES.get(pixels.mode, "RGB")
            data = bytearray(pixels.convert(mode).tobytes())
            return torch.frombuffer(data, dtype=torch.uint8).view(self.height, self.width, self.channels)
        if isinstance(pixels, Tensor):
            found = pixels.detach().cpu()
        else:  # of any strides and byte order, and perhaps read-only
            found = torch.from_numpy(pixels.astype(pixels.dtype.newbyteorder("="), order="C", copy=True))
        if self._has_channels_first:
            found = found.permute(1, 2, 0)
        return found.reshape(self.height, self.width, self.channels)


def reduced(pixels: Tensor, longest: int) -> Tensor:
    """Return pixels [H, W, C] with neighbours averaged, so that the longer side has at most `longest`.

    >>> reduced(torch.tensor([[[0], [100]], [[50], [150]]], dtype=torch.uint8), 1)
    tensor([[[75]]], dtype=torch.uint8)
    """
    height, width, _ = pixels.shape
    if max(height, width) <= longest:
        return pixels
    part = longest / max(height, width)
    size = (max(1, round(height * part)), max(1, round(width * part)))
    smaller = F.interpolate(pixels.permute(2, 0, 1)[None].float(), size=size, mode="area")
    return smaller[0].round().to(torch.uint8).permute(1, 2, 0)


_MODES = {"1": "L", "L": "L", "RGBA": "RGBA", "LA": "RGBA", "PA": "RGBA", "La": "RGBA", "RGBa": "RGBA"}
"""The mode that pictures of PIL are converted to, by their own; all others become RGB."""


def _is_picture(value: Any) -> bool:
    """Return True for a picture of PIL, which need not be imported."""
    return isinstance(getattr(value, "mode", None), str) and hasattr(value, "convert") and hasattr(value, "tobytes")


def _check_type(pixels: Any) -> None:
    is_tensor = isinstance(pixels, Tensor)
    if not is_tensor and not (hasattr(pixels, "__array_interface__") and hasattr(pixels, "astype")):
        raise TypeError(f"unisono.Image was given {a_type(pixels)}: give a tensor, a NumPy array or a picture of PIL")
    if is_tensor and (pixels.layout is not torch.strided or pixels.is_meta):
        raise TypeError("unisono.Image was given a sparse tensor, or one on the meta device: give one with values")
    kind = str(pixels.dtype).removeprefix("torch.") if is_tensor else pixels.dtype.name
    if kind not in _TYPES and not (is_tensor and kind == "bfloat16"):
        raise TypeError(
            f"unisono.Image was given {a_type(pixels)} of {kind}: give uint8 from 0 to 255, or floats from 0 to 1"
        )


def _has_channels_first(shape: tuple[int, ...], layout: str | None) -> bool:
    if len(shape) == 2 and layout is None:
        return False
    if len(shape) == 3:
        first, last = shape[0] in _CHANNELS, shape[2] in _CHANNELS
        if layout is None and first and last:
            raise ValueError(
                f"unisono.Image: the shape {list(shape)} may be C x H x W or H x W x C: say layout='CHW' or 'HWC'"
            )
        if first if layout == "CHW" else last if layout == "HWC" else first or last:
            return layout == "CHW" or (layout is None and first)
    expected = {"HWC": "H x W x C", "CHW": "C x H x W"}.get(layout or "", "H x W, H x W x C or C x H x W")
    remedy = "log one image of a batch, such as images[0]" if len(shape) == 4 else "C is 1, 3 or 4"
    raise ValueError(f"unisono.Image: the shape {list(shape)} is not {expected}; {remedy}")


def _sizes(shape: tuple[int, ...], has_channels_first: bool) -> tuple[int, int, int]:
    """Return channels, height and width."""
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    return (shape[0], shape[1], shape[2]) if has_channels_first else (shape[2], shape[0], shape[1])
