"""The parts of torch with which guidellm reads its prompts: torch itself would be five gigabytes.

All other attributes raise an error.
"""

from . import utils  # noqa: F401


class Generator:
    def manual_seed(self, seed):
        return self
