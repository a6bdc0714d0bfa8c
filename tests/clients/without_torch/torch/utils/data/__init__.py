from .dataloader import DataLoader, get_worker_info  # noqa: F401
from .dataset import IterableDataset  # noqa: F401
