"""Sizes of the axes of a job's mesh, under the names that accelerate's users pass."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from accel_trainer.config.parallel import AXES, AxisSizes
from accel_trainer.config.schema import CommStrategy
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.plugins.kwargs import OptionObject
from accel_trainer.runtime.process import read_environment
from accel_trainer.runtime.torch_private import flatten_mesh

__all__ = [
    "DeepSpeedSequenceParallelConfig",
    "ParallelismConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
]

_PREFIX = "PARALLELISM_CONFIG_"
_ATTENTIONS = ("flash_attention_2", "flash_attention_3", "sdpa")


def _variable(name: str, default: str) -> str:
    return read_environment().get(f"{_PREFIX}{name.upper()}", "").strip() or default


def _number(name: str, default: str) -> int:
    value = _variable(name, default)
    if not value.isdecimal():
        raise ConfigError(
            f"environment variable {_PREFIX}{name.upper()} is {value!r}; expected a whole number of at least 1"
        )
    return int(value)


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism."""

    enable_async_tp: bool = False


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism."""

    cp_comm_strategy: str | None = None
    """"allgather" or "alltoall"; when None, PARALLELISM_CONFIG_CP_COMM_STRATEGY, else "allgather"."""

    def __post_init__(self) -> None:
        self.cp_comm_strategy = self.cp_comm_strategy or _variable("cp_comm_strategy", "allgather")
        if self.cp_comm_strategy not in list(CommStrategy):
            raise ConfigError(
                f"Invalid cp_comm_strategy: {self.cp_comm_strategy}; expected one of {', '.join(CommStrategy)}"
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of sequence parallelism in DeepSpeed."""

    sp_seq_length: int | None = None
    """Tokens of each sequence, where all have as many."""
    sp_seq_length_is_variable: bool | None = None
    """Whether sequences of different batches differ in length; when None, the variable of that name, else True."""
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = _variable("sp_seq_length_is_variable", "true").lower() == "true"
        if self.sp_seq_length is None and not self.sp_seq_length_is_variable:
            length = _variable("sp_seq_length", "")
            if not length:
                raise ConfigError(
                    "sp_seq_length_is_variable is False, and sp_seq_length is not given; pass the length, or set "
                    f"{_PREFIX}SP_SEQ_LENGTH"
                )
            self.sp_seq_length = None if length == "None" else _number("sp_seq_length", "")
        self.sp_attn_implementation = self.sp_attn_implementation or _variable("sp_attn_implementation", "") or None
        name = self.sp_attn_implementation
        if name is not None and name not in _ATTENTIONS and "/" not in name:
            raise ConfigError(
                f"Invalid sp_attn_implementation: {name}; expected one of {', '.join(_ATTENTIONS)}, or a kernel of the "
                "hub as 'owner/name'"
            )


_HANDLERS: dict[str, Callable[..., Any]] = {
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
}


def _is_enabled(axis: str, doc: str) -> Any:
    return property(lambda config: config._size(axis) > 1, doc=doc)


def _names(*axes: str, doc: str) -> Any:
    return property(lambda config: config._named(*axes), doc=doc)


def _product(*axes: str, doc: str) -> Any:
    return property(lambda config: math.prod(map(config._size, axes)), doc=doc)


@dataclass
class ParallelismConfig(OptionObject):
    """Sizes of the axes over which a job is laid out; their product is the number of processes.

    A size that is None comes from `PARALLELISM_CONFIG_...`, and is 1 without that; a dp size then takes the ranks that
    are left, once an Accelerator is made. `dp_replicate_size` alone is DDP, `dp_shard_size` is FSDP2, both are hybrid
    sharding.

    Raises:
        ConfigError: a size is below 1, or two axes exclude each other.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    """"torch"."""
    sp_size: int | None = None
    sp_backend: str | None = None
    """"ulysses"; "deepspeed", accelerate's name for the method, is the same."""
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    ep_size: int | None = None
    """Of the ranks along `dp_shard` and `sp`, those that share experts; not accelerate's, and no factor of ranks."""
    loss_parallel: bool = False
    """Whether training gathers no logits along `tp`; not accelerate's, either."""
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    """Styles of modules by their names, or NAME=STYLE, beside the model's own plan; not accelerate's, either."""
    device_mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        dp_sizes = ("dp_replicate_size", "dp_shard_size")
        self._open = {name for name in dp_sizes if getattr(self, name) is None and not _variable(name, "")}
        for axis in (*AXES, "ep"):
            name = f"{axis}_size"
            if getattr(self, name) is None:
                setattr(self, name, _number(name, "1"))
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name} must be at least 1, but got {size!r}; give the number of ranks")
        # transformers' Trainer computes its own loss where sp_backend is "deepspeed".
        for axis, backend, other in (("cp", "torch", "torch"), ("sp", "ulysses", "deepspeed")):
            name = f"{axis}_backend"
            given = getattr(self, name) or _variable(name, backend)
            if given not in (backend, other):
                raise ConfigError(f"{name} must be {backend!r}, but got {given!r}")
            setattr(self, name, backend)
        if not isinstance(self.tp_plan, Mapping):
            self.tp_plan = _styles_by_name(self.tp_plan)
        self._complete_handlers()
        self._check_axes()

    def _complete_handlers(self) -> None:
        for axis, build in _HANDLERS.items():
            handler = getattr(self, f"{axis}_handler")
            if isinstance(handler, Mapping):  # of to_json()
                handler = build(**handler)
                setattr(self, f"{axis}_handler", handler)
            if handler is None and self._size(axis) > 1:
                setattr(self, f"{axis}_handler", build())
            elif handler is not None and not isinstance(handler, build):  # type: ignore[arg-type]
                raise ConfigError(f"{axis}_handler is a {type(handler).__name__}; expected {build.__name__}")

    def _check_axes(self) -> None:
        if self.cp_enabled and self.sp_enabled:
            raise ConfigError(
                "Context Parallelism (CP) and Sequence Parallelism (SP) are mutually exclusive: cp_size="
                f"{self.cp_size} and sp_size={self.sp_size}; set one of them to 1"
            )
        if self.cp_enabled and self.dp_replicate_enabled and not self.dp_shard_enabled:
            raise ConfigError(
                f"cp_size={self.cp_size} does not go with replicas alone (dp_replicate_size={self.dp_replicate_size}, "
                "dp_shard_size=1); set dp_shard_size above 1, or dp_replicate_size to 1"
            )

    def _size(self, axis: str) -> int:
        return int(getattr(self, f"{axis}_size"))

    def _named(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._size(axis) > 1]

    dp_replicate_enabled = _is_enabled("dp_replicate", "Whether there are replicas.")
    dp_shard_enabled = _is_enabled("dp_shard", "Whether parameters are sharded.")
    tp_enabled = _is_enabled("tp", "Whether there is tensor parallelism.")
    cp_enabled = _is_enabled("cp", "Whether there is context parallelism.")
    sp_enabled = _is_enabled("sp", "Whether there is sequence parallelism.")
    dp_dim_names = _names("dp_replicate", "dp_shard", doc="Axes along which data differs.")
    non_dp_dim_names = _names("tp", "cp", "sp", doc="Axes along which the batch is the same.")
    dp_shard_cp_dim_names = _names("dp_shard", "cp", doc="Axes over which FSDP shards.")
    dp_cp_dim_names = _names("dp_replicate", "dp_shard", "cp", doc="Axes over which losses are averaged.")
    active_mesh_dims = _names("dp_replicate", "dp_shard", "tp", "cp", "sp", doc="All axes of a size above 1.")
    total_size = _product(*AXES, doc="The product of all sizes: the number of processes.")
    data_parallel_size = _product("dp_replicate", "dp_shard", doc="Number of processes that read different data.")
    non_data_parallel_size = _product("tp", "cp", "sp", doc="Number of processes that share a batch.")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Axes of the mesh that FSDP gets."""
        return [*self._named("dp_replicate"), "dp_shard_cp"]

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        names = self._named(*AXES)
        return tuple(names), tuple(map(self._size, names))

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Return a new mesh with its joint axes; None for sizes of 1 and DeepSpeed's sequence axis. Collective."""
        names, sizes = self._get_mesh()
        if not names or self.sp_enabled:
            return None
        mesh = device_mesh.init_device_mesh(device_type, sizes, mesh_dim_names=names)
        joint = {"dp": self.dp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names, "dp_cp": self.dp_cp_dim_names}
        for name, axes in joint.items():
            if axes:
                flatten_mesh(mesh[axes], name)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh, built by the first call, which names the device. Collective then.

        Raises:
            ConfigError: the first call names no device, or a later one another.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ConfigError("get_device_mesh() builds a mesh, and needs its device_type, 'cuda' for instance")
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type not in (None, self.device_mesh.device_type):
            raise ConfigError(
                f"the mesh was built on {self.device_mesh.device_type!r}, and is asked for on {device_type!r}; make "
                "another ParallelismConfig"
            )
        return self.device_mesh

    def take_sizes(self, sizes: AxisSizes) -> None:
        """Take the sizes of a job for those that were not given, where there is an axis."""
        if self.total_size > 1:
            for name in self._open:
                setattr(self, name, getattr(sizes, name.removesuffix("_size")))

    def _is_open(self, name: str) -> bool:
        return name in self._open and getattr(self, name) == 1

    def to_json(self) -> dict[str, Any]:
        """Return sizes, None for those left open, backends and the handlers' options as plain values."""
        names = vars(self).keys() - {"device_mesh", "_open"}
        plain = {name: None if self._is_open(name) else value for name, value in vars(self).items() if name in names}
        return {name: dict(vars(value)) if hasattr(value, "__dict__") else value for name, value in plain.items()}

    def _check_handlers(self) -> None:
        """Refuse options of handlers that would change nothing."""
        if self.sp_handler is not None and self.sp_handler.sp_attn_implementation is not None:
            raise ConfigError(
                f"parallelism_config has sp_attn_implementation={self.sp_handler.sp_attn_implementation!r}, and the "
                "attention is that of the model: load it with attn_implementation=..., and leave this one out"
            )
        if self.tp_handler is not None and self.tp_handler.enable_async_tp:
            raise ConfigError(
                "parallelism_config has enable_async_tp=True, and tensor parallelism here waits for each exchange; "
                "leave it out"
            )

    def explicit(self) -> dict[str, Any]:
        """Return sizes and options by their paths; no sizes where all are 1."""
        self._check_handlers()
        sizes: dict[str, Any] = {}
        if self.total_size > 1:
            names = [f"{axis}_size" for axis in AXES]
            sizes = {f"parallel.{name}": getattr(self, name) for name in names if not self._is_open(name)}
        sizes |= {"parallel.ep_size": self._size("ep")} if self._size("ep") > 1 else {}
        if self.cp_enabled and self.cp_handler is not None:
            sizes["parallel.cp_comm_strategy"] = self.cp_handler.cp_comm_strategy
        sizes |= {"parallel.loss_parallel": True} if self.loss_parallel else {}
        plan = [f"{name}={style}" for name, style in self.tp_plan.items()]
        return sizes | ({"parallel.tp_plan": plan} if plan else {})

    @classmethod
    def of(cls, given: Any) -> ParallelismConfig:
        """Return the sizes that a mapping, its JSON text, or another library's object, has under these names."""
        if isinstance(given, cls):
            return given
        names = [*(f"{axis}_size" for axis in (*AXES, "ep")), "loss_parallel", "tp_plan"]
        if isinstance(given, str) and given.lstrip().startswith("{"):
            given = _read_json(given)
        if isinstance(given, Mapping):
            known = {item.name for item in fields(cls) if item.init}
            if unknown := sorted(given.keys() - known):
                raise ConfigError(
                    f"parallelism_config has the unknown key {unknown[0]!r}{did_you_mean(unknown[0], known)}"
                )
            return cls(**given)
        sizes = {name: getattr(given, name) for name in names if hasattr(given, name)}
        if not sizes:
            raise ConfigError(
                f"parallelism_config is a {type(given).__name__}; pass a ParallelismConfig, or a mapping with some of "
                f"{', '.join(names)}"
            )
        return cls(**sizes, cp_handler=_handler_of(given))


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"parallelism_config is no valid JSON: {error}; got {text!r}") from None


def _styles_by_name(given: Sequence[str]) -> dict[str, str]:
    """Return the style of each module of a plan that is written as in a file."""
    pairs = [(name, style) for name, is_given, style in (str(each).partition("=") for each in given) if is_given]
    if isinstance(given, str) or len(pairs) < len(given):
        raise ConfigError(
            f"tp_plan is {given!r}; expected styles by the names of modules, or a list of NAME=STYLE: write "
            "{'layers.*.up': 'colwise'}, for one"
        )
    return dict(pairs)


def _handler_of(given: Any) -> TorchContextParallelConfig | None:
    """Return the options of context parallelism that another library's object has, or a configuration of ours."""
    comm_strategy = getattr(getattr(given, "cp_handler", given), "cp_comm_strategy", None)
    return None if comm_strategy is None else TorchContextParallelConfig(str(comm_strategy))
