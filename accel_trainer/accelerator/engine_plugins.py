"""The DeepSpeed plugins of an Accelerator: several by name, one of them in use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accel_trainer.accelerator.options import AcceleratorOptions, resolve_options
from accel_trainer.config import Resolved
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.plugins.deepspeed_plugin import DeepSpeedPlugin
from accel_trainer.strategies.api import Capabilities, Strategy

__all__ = ["EnginePlugins"]

_ONLY = "default"
"""Name of a plugin that is the only one."""


@dataclass
class EnginePlugins:
    """Plugins by name, each with the configuration that it resolves to."""

    plugins: dict[str, DeepSpeedPlugin] = field(default_factory=dict)
    resolved: dict[str, Resolved] = field(default_factory=dict)
    selected: str | None = None
    _shown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, single: Any, several: Mapping[str, DeepSpeedPlugin] | None) -> EnginePlugins:
        """Return what was passed to an Accelerator; the first of several is in use first.

        Raises:
            ConfigError: both arguments were given, or something that is no plugin.
        """
        if single is not None and several is not None:
            raise ConfigError("deepspeed_plugin and deepspeed_plugins were both given; pass one of them")
        given = several if several is not None else single
        plugins = dict(given) if isinstance(given, Mapping) else {} if given is None else {_ONLY: given}
        for name, plugin in plugins.items():
            if not isinstance(plugin, DeepSpeedPlugin):
                raise ConfigError(f"the DeepSpeed plugin {name!r} is a {type(plugin).__name__}; pass a DeepSpeedPlugin")
        return cls(plugins)

    @property
    def first(self) -> DeepSpeedPlugin | None:
        """The plugin that is in use from the beginning."""
        return next(iter(self.plugins.values()), None)

    @property
    def current(self) -> DeepSpeedPlugin | None:
        """The plugin in use."""
        return None if self.selected is None else self.plugins[self.selected]

    def resolve(
        self,
        first: Resolved,
        facts: Capabilities,
        options_with: Callable[[DeepSpeedPlugin], AcceleratorOptions],
        environ: Mapping[str, str],
        config: str | Path | Mapping[str, Any] | Resolved | None,
    ) -> None:
        """Resolve the configuration of each plugin; `first` is that of the first. One is made where none was given.

        Args:
            options_with: returns the options of the Accelerator with a plugin.

        Raises:
            ConfigError: what one of them says cannot be.
        """
        if not self.plugins and facts.distributed_type == "DEEPSPEED":
            self.plugins[_ONLY] = DeepSpeedPlugin(hf_ds_config=dict(first.config.deepspeed))
        for name, plugin in self.plugins.items():
            is_first = plugin is self.first
            self.resolved[name] = first if is_first else resolve_options(options_with(plugin), environ, config)

    def use(self, name: str | None, resolved: Resolved, strategy: Strategy) -> Resolved:
        """Have a plugin be the one in use, with the configuration that holds for it, and show that in it."""
        self.selected = name
        for known, plugin in self.plugins.items():
            plugin.selected = known == name
            plugin.building = strategy.building if plugin.selected else None
        if self.current is not None:
            self.current.refresh(resolved.config)
            self._shown = copy.deepcopy(self.current.deepspeed_config)
        return resolved

    def edited(self, resolved: Resolved) -> Resolved:
        """Return the configuration with what was written into the plugin's `deepspeed_config` since."""
        if self.current is None or self.current.deepspeed_config == self._shown:
            return resolved
        return replace(resolved, config=replace(resolved.config, deepspeed=self.current.deepspeed_config))

    def require(self, name: str) -> DeepSpeedPlugin:
        """Return a plugin by its name.

        Raises:
            ConfigError: there is none of that name.
        """
        if name not in self.plugins:
            known = ", ".join(map(repr, self.plugins)) or "none"
            raise ConfigError(
                f"no DeepSpeed plugin is called {name!r}{did_you_mean(name, self.plugins) or '.'} This Accelerator "
                f"has {known}. Pass Accelerator(deepspeed_plugins={{{name!r}: DeepSpeedPlugin(...)}})"
            )
        return self.plugins[name]
