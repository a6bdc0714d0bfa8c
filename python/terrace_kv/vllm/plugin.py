"""Entry point of vLLM's plugin group ``vllm.general_plugins``: registers the names of Terrace's connectors and tier.

vLLM calls :func:`register` in each of its processes, before it reads ``--kv-transfer-config``. With the names registered, neither
``kv_connector_module_path`` nor a tier's ``module_path`` is needed. ``VLLM_PLUGINS``, if set, must contain ``terrace``.
"""

from __future__ import annotations

import logging
from importlib import import_module

# Under the name that vLLM shows what is logged of.
logger = logging.getLogger("vllm.terrace")

_CONNECTOR_FACTORY = ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory", "register_connector")
_TIER_FACTORY = ("vllm.v1.kv_offload.tiering.factory", "SecondaryTierFactory", "register_tier")

# By the name in vLLM's configuration: the factory that knows such names, the module and the class.
NAMES = {
    "TerraceConnector": (_CONNECTOR_FACTORY, "terrace_kv.vllm", "TerraceConnector"),
    "TerraceHiddenStatesConnector": (_CONNECTOR_FACTORY, "terrace_kv.vllm.hidden_states", "HiddenStatesConnector"),
    "TerraceTier": (_TIER_FACTORY, "terrace_kv.vllm", "TerraceTier"),
}


def register() -> None:
    """Registers all names. May be called several times. Imports the classes only when vLLM creates them.

    Never raises, because an exception here would stop every start of vLLM, also without Terrace in its configuration. A name
    that could not be registered is still found by its module path.
    """
    for name, ((factory_module, factory, method), module, class_name) in NAMES.items():
        try:
            registered = getattr(import_module(factory_module), factory)
            # vLLM refuses names that are registered already, and has no public way to ask.
            if name not in registered._registry:
                getattr(registered, method)(name, module, class_name)
        except Exception as error:
            logger.debug("Terrace's name %s is not registered with this version of vLLM: %s", name, error)
