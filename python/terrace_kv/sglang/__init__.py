"""HiCache storage backend for SGLang: ``--hicache-storage-backend dynamic`` with this module."""

from .storage import TerraceStorage

__all__ = ["TerraceStorage"]
