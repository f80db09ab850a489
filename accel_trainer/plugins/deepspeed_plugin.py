"""DeepSpeed's options as objects, and placeholders for the optimizer and schedule of its configuration."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from accel_trainer.config import Resolved
from accel_trainer.config.config_source import problem_report
from accel_trainer.config.deepspeed_block import (
    FIELDS,
    SHARED_KEYS,
    ZERO3_INIT,
    BlockSource,
    block_of,
    leaves,
    read_block,
)
from accel_trainer.config.schema import RunConfig, get_key, set_key
from accel_trainer.config.validation import show
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.plugins.kwargs import OptionObject
from accel_trainer.strategies.api import Capabilities, Strategy

_AUTO = "auto"
_ONLY = "default"  # name of a plugin that is the only one
_MOE = "deepspeed_moe_layer_cls_names"
_KEYS = {key: "transformer_moe_cls_names" if key == _MOE else key for key in (*FIELDS, *SHARED_KEYS)}
"""Field of the plugin for each key of a block that has one."""

_READ_BY_SCRIPTS = {
    "train_batch_size": _AUTO,
    "train_micro_batch_size_per_gpu": _AUTO,
    "gradient_accumulation_steps": _AUTO,
    "gradient_clipping": _AUTO,
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
}


class HfDeepSpeedConfig:
    """A DeepSpeed configuration (`config`, a plain dict that may be changed) that can be asked, by dotted paths."""

    def __init__(self, config_file_or_dict: BlockSource) -> None:
        """Read a mapping, JSON text, base64 of it, a JSON or YAML file, or a packaged name."""
        self.config: dict[str, Any] = read_block(block_of(config_file_or_dict)).data

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the section that a dotted path leads into, None where there is none, and the last name of the path."""
        section, _, name = ds_key_long.rpartition(".")
        node = get_key(self.config, section) if section else self.config
        return (node if isinstance(node, dict) else None), name

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value at a dotted path; `default` where there is none, or null."""
        return get_key(self.config, ds_key_long, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a section or a value; a ConfigError where it must exist, and does not."""
        node, name = self.find_config_node(ds_key_long)
        if node is not None and name in node:
            del node[name]
        elif must_exist:
            raise ConfigError(f"the DeepSpeed configuration has no {ds_key_long!r} to remove: {show(self.config)}")

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value at a dotted path is left to the run."""
        return bool(self.get_value(ds_key_long) == _AUTO)

    def is_true(self, ds_key_long: str) -> bool:
        """Whether there is a value at a dotted path that counts as true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether there is a value at a dotted path that counts as false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def dtype(self) -> torch.dtype:
        """Return the dtype that the engine computes in, and wants floating-point inputs in."""
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return next((kinds[kind] for kind in kinds if self.get_value(f"{kind}.enabled") is True), torch.float32)

    def is_zero2(self) -> bool:
        """Whether gradients are sharded, and parameters are not."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Whether parameters are sharded."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Whether optimizer state or parameters rest outside of the device."""
        sections = ("offload_optimizer", "offload_param")
        devices = {self.get_value(f"zero_optimization.{name}.device") for name in sections}
        return bool(devices & {"cpu", "nvme"})


@dataclass
class DeepSpeedPlugin(OptionObject):
    """Run with DeepSpeed: giving one chooses strategy "deepspeed". None leaves an option as configured.

    Fields may be set until an Accelerator is made, which has the plugin show the resolved configuration of the run.
    `deepspeed_config` may be changed until `prepare` is called, which gives it to the engine.

    Raises:
        ConfigError: the configuration cannot be read, or says something else than a field that was given.
    """

    hf_ds_config: Any = None
    """A DeepSpeed configuration: a mapping, JSON text, base64 of it, a JSON or YAML file, or a packaged name."""
    gradient_accumulation_steps: Any = None
    """Micro-batches of an update, or "auto"."""
    gradient_clipping: Any = None
    """Bound of the gradient norm, or "auto"."""
    zero_stage: int | None = None
    """0 to 3; by default 2."""
    is_train_batch_min: bool = True
    """Of several prepared loaders, whether the smallest batch size is the engine's; else the largest."""
    offload_optimizer_device: str | None = None
    """none, cpu or nvme."""
    offload_param_device: str | None = None
    """none, cpu or nvme; stage 3 only."""
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    """Shard models while they are built, so that no rank holds a full one; None does so at stage 3."""
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    """Classes of mixture-of-experts layers whose parameters are gathered together: names, separated by commas."""
    enable_msamp: bool | None = None
    """Refused when true: MS-AMP is not offered."""
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        if self.enable_msamp or self.msamp_opt_level is not None:
            raise ConfigError(
                f"DeepSpeedPlugin(enable_msamp={self.enable_msamp}, msamp_opt_level={self.msamp_opt_level!r}): MS-AMP "
                "is not offered; leave both out, and use mixed_precision='bf16'"
            )
        self._given = {f.name: getattr(self, f.name) for f in fields(self)}
        self.hf_ds_config = HfDeepSpeedConfig(self._block())
        # What scripts read, as accelerate's plugin has it from the start: keys with what their absence means.
        self._added = self._add_absent(_READ_BY_SCRIPTS if self._given["hf_ds_config"] is None else {})
        self.building: Callable[[bool], contextlib.AbstractContextManager[None]] | None = None
        """Switch of the strategy of the Accelerator that uses the plugin: true shards models while they are built."""
        self.selected = False
        """Whether it is the plugin in use, of several."""
        self._edited: dict[str, Any] | None = None
        self._show()

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration, "auto" included."""
        config: dict[str, Any] = self.hf_ds_config.config
        return config

    @deepspeed_config.setter
    def deepspeed_config(self, config: dict[str, Any]) -> None:
        self.hf_ds_config.config = config

    def _block(self) -> dict[str, Any]:
        source = self._given["hf_ds_config"]
        if source is not None and not isinstance(source, str | Mapping):
            source = getattr(source, "config", source)  # of an HfDeepSpeedConfig, or another library's
        block = block_of(source) if source is not None else {}
        for key, name in _KEYS.items():
            value = self._given[name]
            if value is not None and (key in FIELDS or value != _AUTO):
                known = block.get(key)
                if known not in (None, _AUTO, value):
                    raise ConfigError(
                        f"DeepSpeedPlugin({key}={value!r}): its hf_ds_config says {show(known)}; give one of the two, "
                        'or write "auto" there'
                    )
                block[key] = value
        return block

    def _add_absent(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Put values where the configuration has none, and return those."""
        absent = {path: value for path, value in values.items() if get_key(self.deepspeed_config, path) is None}
        for path, value in absent.items():
            set_key(self.deepspeed_config, path, value)
        return absent

    def _show(self) -> None:
        """Set the fields to the values of the configuration."""
        ask = self.hf_ds_config.get_value
        self.gradient_accumulation_steps = ask("gradient_accumulation_steps", _AUTO)
        self.gradient_clipping = ask("gradient_clipping", _AUTO)
        self.zero_stage = ask("zero_optimization.stage", 0)
        for name in ("offload_optimizer", "offload_param"):
            setattr(self, f"{name}_device", ask(f"zero_optimization.{name}.device", "none"))
            setattr(self, f"{name}_nvme_path", ask(f"zero_optimization.{name}.nvme_path", "none"))
        self.zero3_save_16bit_model = ask("zero_optimization.stage3_gather_16bit_weights_on_model_save", False)
        classes = ask("zero_optimization.leaf_module.classes")
        self.transformer_moe_cls_names = ",".join(classes) if classes else None
        self.zero3_init_flag = self.hf_ds_config.is_zero3() and ask(ZERO3_INIT) is not False
        self._shown = copy.deepcopy(self.deepspeed_config)
        self._shown_fields = {name: getattr(self, name) for name in _KEYS.values()}

    def _take_fields(self) -> None:
        """Put the fields that were set since they were shown into the configuration."""
        for key, name in _KEYS.items():
            value = getattr(self, name)
            if value not in (None, self._shown_fields[name]):
                path = FIELDS.get(key, key)
                # What is read is checked, and has no "none", which takes an offload back.
                set_key(self.deepspeed_config, path, get_key(read_block({key: value}).data, path, value))

    def engine_config(self) -> dict[str, Any]:
        """Return the configuration without the keys that are there for scripts to read."""
        config: dict[str, Any] = {}
        for path, value in leaves(self.deepspeed_config, known_only=True):
            if self._added.get(path) != value:
                set_key(config, path, copy.deepcopy(value))
        return config

    def _find_changes(self) -> dict[str, Any] | None:
        """Return the configuration where the script has changed it, before an earlier Accelerator too; else None."""
        return copy.deepcopy(self._edited) if self.deepspeed_config == self._shown else self.engine_config()

    def explicit(self) -> dict[str, Any]:
        """Return the options that were set, by dotted path."""
        options: dict[str, Any] = {"strategy": "deepspeed"}
        self._take_fields()
        if (changed := self._find_changes()) is not None:
            return {**options, "deepspeed": changed}
        steps = self._given["gradient_accumulation_steps"]
        block = self._block()
        if self._given["hf_ds_config"] is None:
            block.pop("gradient_accumulation_steps", None)
        if steps not in (None, _AUTO):
            options["accumulation.num_steps"] = steps
        if block:
            options["deepspeed"] = block
        return options

    def refresh(self, config: RunConfig) -> None:
        """Show the configuration of a run."""
        self._edited = self._find_changes()
        self.deepspeed_config.clear()
        self.deepspeed_config.update(read_block(config.deepspeed).data)
        if self.deepspeed_config.get("gradient_accumulation_steps", _AUTO) == _AUTO:
            self.deepspeed_config["gradient_accumulation_steps"] = config.accumulation.num_steps
        self._add_absent(self._added)
        self._show()

    def select(self) -> None:
        """Raise a ConfigError: a plugin alone cannot change which one an Accelerator uses."""
        raise ConfigError(
            "DeepSpeedPlugin.select() was called, and a plugin does not know its Accelerator; call "
            "accelerator.state.select_deepspeed_plugin(name)"
        )

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are sharded while they are built."""
        return bool(self.zero3_init_flag)

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Shard the models of a `with` block while they are built, or not, where an Accelerator uses the plugin."""
        before = self.zero3_init_flag
        self.zero3_init_flag = enable
        try:
            with contextlib.nullcontext() if self.building is None else self.building(enable):
                yield
        finally:
            self.zero3_init_flag = before

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value at a dotted path is left to the run."""
        return bool(self.hf_ds_config.is_auto(ds_key_long))

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value at a dotted path; `default` where there is none, or null."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Put `kwargs[ds_key_long]` where "auto" stands, or add to `mismatches` where it has to match and differs."""
        node, name = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None:
            return
        known = node.get(name)
        if known == _AUTO and ds_key_long not in kwargs:
            raise ConfigError(
                f"{ds_key_long} is 'auto' in the DeepSpeed configuration, and no value was passed for it; write one "
                f"there, or pass **{{{ds_key_long!r}: value}}"
            )
        if known == _AUTO:
            node[name] = kwargs[ds_key_long]
        elif must_match and mismatches is not None and known not in (None, kwargs.get(ds_key_long, known)):
            mismatches.append(f"{ds_key_long} is {show(known)}, and {show(kwargs[ds_key_long])} was passed")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: Mapping[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Put the values of `kwargs`, by dotted path, where "auto" stands, and compare them with all others.

        Args:
            prefix: beginning of the paths of `config`, which is a section; None is the full configuration.
            mismatches: gets a line for each difference, which is then no error.

        Raises:
            ConfigError: an "auto" has no value, or values differ; all of them at once.
        """
        found: list[str] = []
        open_ones: list[str] = []
        content = self.deepspeed_config if config is None else config
        for path in [f"{prefix}{inner}" for inner, _ in leaves(content)]:
            try:
                self.fill_match(path, found, must_match, **kwargs)
            except ConfigError as error:
                open_ones.append(str(error))
        if mismatches is not None:
            mismatches.extend(found)
        elif found:
            found.append('give the same values in the DeepSpeed configuration, or write "auto" there')
            open_ones.append("; ".join(found))
        if open_ones:
            raise ConfigError(problem_report(open_ones, "the DeepSpeed configuration"))

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Put a value at a dotted path; sections that are missing are made."""
        set_key(self.deepspeed_config, ds_key_long, value)


@dataclass
class DeepSpeedPlugins:
    """DeepSpeed plugins of an Accelerator by name, each with the configuration that it resolves to; one is in use."""

    plugins: dict[str, DeepSpeedPlugin] = field(default_factory=dict)
    resolved: dict[str, Resolved] = field(default_factory=dict)
    selected: str | None = None
    _shown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, single: Any, several: Mapping[str, DeepSpeedPlugin] | None) -> DeepSpeedPlugins:
        """Return the plugins that an Accelerator was given; the first of several is in use first."""
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
        self, first: Resolved, facts: Capabilities, resolve_with: Callable[[DeepSpeedPlugin], Resolved]
    ) -> None:
        """Resolve the plugins' configurations by `resolve_with` (`first` is done); without any, make a plugin."""
        if not self.plugins and facts.distributed_type == "DEEPSPEED":
            self.plugins[_ONLY] = DeepSpeedPlugin(hf_ds_config=dict(first.config.deepspeed))
        for name, plugin in self.plugins.items():
            self.resolved[name] = first if plugin is self.first else resolve_with(plugin)
            self._shown[name] = copy.deepcopy(plugin.deepspeed_config)

    def use(self, name: str | None, resolved: Resolved, strategy: Strategy) -> Resolved:
        """Put a plugin in use, and have it show the configuration that holds for it."""
        self.selected = name
        for known, plugin in self.plugins.items():
            plugin.selected = known == name
            plugin.building = strategy.building if plugin.selected else None
        if name is not None:
            config, before = self.plugins[name].deepspeed_config, self._shown[name]
            changes = {key: value for key, value in config.items() if key not in before or before[key] != value}
            self.plugins[name].refresh(resolved.config)
            self._shown[name] = copy.deepcopy(config)
            config.update(changes)  # made while another was in use
        return resolved

    def edited(self, resolved: Resolved) -> Resolved:
        """Return the configuration with the changes to the plugin's `deepspeed_config` by the script."""
        if self.selected is None or self.plugins[self.selected].deepspeed_config == self._shown[self.selected]:
            return resolved
        changed = self.plugins[self.selected].engine_config()
        return replace(resolved, config=replace(resolved.config, deepspeed=changed))

    def require(self, name: str) -> DeepSpeedPlugin:
        """Return a plugin by its name; a ConfigError where there is none."""
        if name not in self.plugins:
            known = ", ".join(map(repr, self.plugins)) or "none"
            raise ConfigError(
                f"no DeepSpeed plugin is called {name!r}{did_you_mean(name, self.plugins) or '.'} This Accelerator "
                f"has {known}. Pass Accelerator(deepspeed_plugins={{{name!r}: DeepSpeedPlugin(...)}})"
            )
        return self.plugins[name]


class DummyOptim:
    """Placeholder for the optimizer of the DeepSpeed configuration; `prepare` returns the engine's.

    Its numbers take the place of "auto" in the configuration.

    Attributes:
        params: the parameters, or groups of them.
        numbers: hyperparameters that were given, by name.
    """

    def __init__(
        self, params: Iterable[Any], lr: float | None = None, weight_decay: float | None = None, **kwargs: Any
    ) -> None:
        self.params = list(params)
        given = {"lr": lr, "weight_decay": weight_decay, **kwargs}
        self.numbers = {name: value for name, value in given.items() if value is not None}
        self.lr = 0.001 if lr is None else lr
        self.weight_decay = 0.0 if weight_decay is None else weight_decay
        self.kwargs = kwargs

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters as an optimizer has them, with the learning rate and weight decay."""
        groups = self.params if self.params and isinstance(self.params[0], Mapping) else [{"params": self.params}]
        return [{"lr": self.lr, "weight_decay": self.weight_decay, **self.kwargs, **group} for group in groups]


class DummyScheduler:
    """Placeholder for the schedule of the DeepSpeed configuration; `prepare` returns the engine's.

    Attributes:
        optimizer: the optimizer, or the `DummyOptim`, that is scheduled.
        numbers: hyperparameters that were given, by name.
        lr_scheduler_callable: builds a torch scheduler from the engine's optimizer, where the configuration has none.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int | None = None,
        lr_scheduler_callable: Any = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        given = {"total_num_steps": total_num_steps, "warmup_num_steps": warmup_num_steps, **kwargs}
        self.numbers = {name: value for name, value in given.items() if value is not None}
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = 0 if warmup_num_steps is None else warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
