"""Where models come from and go to: the authors' parameter trees, and folders that other libraries read."""

from rmt.hub.reference import from_reference

__all__ = ["from_reference"]
