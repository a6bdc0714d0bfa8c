"""SGLang's hierarchical cache on a store of Terrace's: ``--hicache-storage-backend dynamic`` with this module."""

from .storage import TerraceStorage

__all__ = ["TerraceStorage"]
