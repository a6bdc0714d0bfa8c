"""`vllm bench serve` from vLLM's wheel, without torch and the engine, which measuring a server does
not need.

Everything that makes requests and measures answers is vLLM's own. Its imports for tensors, devices,
images, sound and adapters are replaced by empty names, which text does not need.

The arguments are those of `vllm bench serve`; `--then` and further arguments make another run,
without another start of the program.
"""

import argparse
import importlib.abc
import importlib.machinery
import itertools
import sys
import types

# Imported first, because it checks for torch on import and must get the right answer.
import transformers  # noqa: F401

ABSENT = (
    "torch",
    "vllm.distributed",
    "vllm.env_override",
    "vllm.inputs",
    "vllm.lora",
    "vllm.multimodal",
    "vllm.utils.torch_utils",
)


class Nothing(type):
    """A class whose every attribute is a class like it, for use in annotations."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})


class AbsentModule(types.ModuleType):
    def __getattr__(self, name):
        return getattr(Nothing(self.__name__, (), {}), name)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if any(name == absent or name.startswith(f"{absent}.") for absent in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return AbsentModule(spec.name)

    def exec_module(self, module):
        pass


def main():
    sys.meta_path.insert(0, Absent())
    from vllm.benchmarks import serve

    parser = argparse.ArgumentParser(prog="vllm bench serve")
    serve.add_cli_args(parser)
    for is_between, arguments in itertools.groupby(sys.argv[1:], "--then".__eq__):
        if not is_between:
            serve.main(parser.parse_args(list(arguments)))


if __name__ == "__main__":
    main()
