"""The little of torch that guidellm reads its prompts with: torch itself would be five gigabytes.

Whatever else is asked of it does not exist, and says so.
"""

from . import utils  # noqa: F401


class Generator:
    def manual_seed(self, seed):
        return self
