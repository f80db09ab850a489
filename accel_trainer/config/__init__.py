"""Typed configuration and where each value came from. Imports no torch."""

from __future__ import annotations

from accel_trainer.config.config_source import packaged_names
from accel_trainer.config.dialects.fsdp import fsdp_options
from accel_trainer.config.files import Dialect, read_file, to_file_dict, to_yaml
from accel_trainer.config.layer import Source, SourceKind
from accel_trainer.config.resolve import Resolved, build_config, flag_name, resolve
from accel_trainer.config.schema import (
    ChangedRunAction,
    Compat,
    CompileConfig,
    FieldSpec,
    Fp8Backend,
    Fp8Config,
    FSDPConfig,
    HangConfig,
    LaunchConfig,
    LossDivision,
    LossImplementation,
    MixedPrecision,
    NonFiniteAction,
    OuterOptimizerConfig,
    OutputDtype,
    RankLossAction,
    RunConfig,
    SchedulerSteps,
    StateDictType,
    WrapPolicy,
    field_specs,
)

__all__ = [
    "ChangedRunAction", "Compat", "CompileConfig", "Dialect", "FSDPConfig", "FieldSpec", "Fp8Backend", "Fp8Config",
    "HangConfig", "LaunchConfig", "LossDivision", "LossImplementation", "MixedPrecision", "NonFiniteAction",
    "OuterOptimizerConfig", "OutputDtype", "RankLossAction", "Resolved", "RunConfig", "SchedulerSteps", "Source",
    "SourceKind", "StateDictType", "WrapPolicy", "build_config", "field_specs", "flag_name", "fsdp_options",
    "packaged_names", "read_file", "resolve", "to_file_dict", "to_yaml",
]  # fmt: skip
