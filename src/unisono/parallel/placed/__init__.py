"""The layers of one model on several devices of one process."""

from unisono.parallel.placed.place import PlacedModel, place

__all__ = ["PlacedModel", "place"]
