"""Typed configuration and where each value came from. Imports no torch."""

from __future__ import annotations

from accel_trainer.config.deepspeed.block import block_of, read_deepspeed
from accel_trainer.config.dialects.environment import RESERVED_VARIABLES, variable_name
from accel_trainer.config.dialects.fsdp import fsdp_options
from accel_trainer.config.files import Dialect, FileConfig, read_file, to_file_dict, to_yaml
from accel_trainer.config.layer import Setting, Source, SourceKind
from accel_trainer.config.readers.config_source import packaged_names
from accel_trainer.config.resolve import Resolved, build_config, flag_name, resolve
from accel_trainer.config.schema import (
    AccumulationConfig,
    CompileConfig,
    DataConfig,
    DDPConfig,
    FieldSpec,
    FrozenDict,
    FSDPConfig,
    LaunchConfig,
    MixedPrecision,
    OutputDtype,
    RunConfig,
    StateDictType,
    WrapPolicy,
    field_specs,
    get_value,
)

__all__ = [
    "RESERVED_VARIABLES",
    "AccumulationConfig",
    "CompileConfig",
    "DDPConfig",
    "DataConfig",
    "Dialect",
    "FSDPConfig",
    "FieldSpec",
    "FileConfig",
    "FrozenDict",
    "LaunchConfig",
    "MixedPrecision",
    "OutputDtype",
    "Resolved",
    "RunConfig",
    "Setting",
    "Source",
    "SourceKind",
    "StateDictType",
    "WrapPolicy",
    "block_of",
    "build_config",
    "field_specs",
    "flag_name",
    "fsdp_options",
    "get_value",
    "packaged_names",
    "read_deepspeed",
    "read_file",
    "resolve",
    "to_file_dict",
    "to_yaml",
    "variable_name",
]
