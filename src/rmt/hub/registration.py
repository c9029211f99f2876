"""Tells transformers' Auto classes about our models, whichever of the two packages is imported first.

`import rmt` calls `register()`. What transformers has loaded already is told at once. For the rest a finder on
`sys.meta_path` waits for the two modules that hold the registries and tells them as soon as they have run, so that
`import rmt` imports neither transformers nor torch. The finder finds nothing itself: it asks the others and adds one
call to what they found.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

CONFIGURATIONS = "transformers.models.auto.configuration_auto"
MODELS = "transformers.models.auto.modeling_auto"


def add_configuration(auto: Any) -> None:
    from rmt.hub.configuration import RMTConfig

    auto.AutoConfig.register(RMTConfig.model_type, RMTConfig, exist_ok=True)


def add_models(auto: Any) -> None:
    from rmt.hub.configuration import RMTConfig
    from rmt.hub.modeling import RMTForCausalLM, RMTModel

    auto.AutoModel.register(RMTConfig, RMTModel, exist_ok=True)
    auto.AutoModelForCausalLM.register(RMTConfig, RMTForCausalLM, exist_ok=True)
    # `transformers serve` looks the architecture of a config.json up by its name in the package itself.
    for model in (RMTModel, RMTForCausalLM):
        setattr(sys.modules["transformers"], model.__name__, model)


TOLD: dict[str, Callable[[Any], None]] = {CONFIGURATIONS: add_configuration, MODELS: add_models}


class Waiting:
    """A finder that lets the others find a module of `TOLD` and tells it about us once it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in TOLD:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_tell(module: ModuleType) -> None:
                run(module)
                TOLD[name](module)

            spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Tell transformers about our models now, or when it is imported."""
    for name, tell in TOLD.items():
        if name in sys.modules:
            tell(sys.modules[name])
    if not TOLD.keys() <= sys.modules.keys() and not any(isinstance(finder, Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, Waiting())
