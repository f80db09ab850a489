"""The whole file that `accelerate config` writes.

Every key is mapped, accepted when it asks for nothing, or refused with the way out when its value would change the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_trainer.config.deepspeed.block import is_whole, named_file
from accel_trainer.config.deepspeed.levels import check_fields, put_document_block
from accel_trainer.config.dialects import fsdp as fsdp_dialect
from accel_trainer.config.dialects.fsdp import is_neutral
from accel_trainer.config.layer import Layer
from accel_trainer.config.readers.document import Document, Key, Node
from accel_trainer.config.schema import field_specs, section_names
from accel_trainer.config.validation import show
from accel_trainer.errors import did_you_mean

__all__ = ["MARKER_KEYS", "known_keys", "put_parallelism", "translate"]

MARKER_KEYS = frozenset({
    "compute_environment", "distributed_type", "fsdp_config", "deepspeed_config", "dynamo_config", "fp8_config",
    "megatron_lm_config", "mpirun_config", "parallelism_config", "ipex_config", "downcast_bf16",
})  # fmt: skip
"""Keys that only an accelerate file has; one of them decides the dialect."""

_DIRECT = {
    "mixed_precision": "mixed_precision",
    "use_cpu": "use_cpu",
    "debug": "debug",
    "gradient_accumulation_steps": "accumulation.num_steps",
    "num_processes": "launch.num_processes",
    "num_machines": "launch.num_machines",
    "machine_rank": "launch.machine_rank",
    "main_process_ip": "launch.main_process_ip",
    "main_process_port": "launch.main_process_port",
    "rdzv_backend": "launch.rdzv_backend",
    "rdzv_conf": "launch.rdzv_conf",
    "same_network": "launch.same_network",
    "gpu_ids": "launch.gpu_ids",
    "enable_cpu_affinity": "launch.enable_cpu_affinity",
    "num_cpu_threads_per_process": "launch.num_cpu_threads_per_process",
    "max_restarts": "launch.max_restarts",
    "monitor_interval": "launch.monitor_interval_seconds",
    "tee": "launch.tee",
    "log_dir": "launch.log_dir",
    "role": "launch.role",
    "main_training_function": "launch.main_training_function",
}
_NO_TPU = "there is no TPU strategy; remove the TPU keys"
_NOT_OFFERED = {
    "tpu_name": _NO_TPU,
    "tpu_zone": _NO_TPU,
    "tpu_use_cluster": _NO_TPU,
    "tpu_use_sudo": _NO_TPU,
    "tpu_vm": _NO_TPU,
    "tpu_env": _NO_TPU,
    "commands": _NO_TPU,
    "command_file": _NO_TPU,
    "downcast_bf16": "it exists on TPUs only; use mixed_precision: bf16",
    "megatron_lm_config": "there is no Megatron-LM strategy; use distributed_type: FSDP or DEEPSPEED",
    "fp8_config": "fp8 recipes are not read from files; remove the block",
    "mpirun_config": "start the script with mpirun itself, the ranks are detected; remove the block",
    "ipex_config": "Intel's extension is not used, PyTorch has it built in; remove the block",
}
_SAGEMAKER_KEYS = (
    "ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name", "pytorch_version",
    "transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args",
)  # fmt: skip
_DYNAMO = {
    "backend": "compile.backend",
    "mode": "compile.mode",
    "use_fullgraph": "compile.fullgraph",
    "use_dynamic": "compile.dynamic",
    "use_regional_compilation": "compile.regional",
}
_PARALLEL_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_PARALLEL_DETAILS = (
    "cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable",
    "sp_attn_implementation",
)  # fmt: skip
_SECTIONS = ("fsdp_config", "deepspeed_config", "dynamo_config", "parallelism_config")
_SPECIAL = ("compute_environment", "distributed_type", "fp16", "dynamo_backend", *_SECTIONS)
_DISTRIBUTED_TYPES = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU",
    "MULTI_NEURON", "FSDP", "DEEPSPEED",
)  # fmt: skip


def known_keys() -> frozenset[str]:
    """Return every top-level key of an accelerate file."""
    return frozenset({*_DIRECT, *_NOT_OFFERED, *_SPECIAL, *_SAGEMAKER_KEYS})


def translate(document: Document, content: Mapping[Key, Node], layer: Layer) -> None:
    """Put an accelerate file into the layer."""
    by_name = {key.name: (key, node) for key, node in content.items()}
    reader = _Reader(document, layer)
    environment = by_name.get("compute_environment")
    if environment is not None and environment[1].value == "AMAZON_SAGEMAKER":
        reader.refuse(*environment, "start the job with SageMaker's own tools and a file for LOCAL_MACHINE")
        return
    for name, (key, node) in by_name.items():
        if name in _DIRECT:
            # accelerate writes -1 for "ask at launch" and null for every default.
            unset = name == "num_processes" and node.value == -1
            reader.put(_DIRECT[name], key, None if unset else node.plain(), node.text)
        elif name in _NOT_OFFERED:
            if not is_neutral(node.plain()):
                reader.refuse(key, node, _NOT_OFFERED[name])
        elif name == "compute_environment":
            if node.value not in (None, "LOCAL_MACHINE"):
                reader.wrong(key, node, "LOCAL_MACHINE")
        elif name not in _SPECIAL:
            hint = _dialect_hint(name) or did_you_mean(name, known_keys())
            layer.problems.append(f"unknown key {name!r}{document.at(key.line)}{hint}")
    reader.legacy(by_name.get("fp16"), by_name.get("dynamo_backend"), "mixed_precision" in by_name)
    fsdp_block = reader.section(by_name.get("fsdp_config"))
    deepspeed_block = reader.section(by_name.get("deepspeed_config"))
    reader.dynamo(reader.section(by_name.get("dynamo_config")))
    kind = reader.distributed_type(by_name.get("distributed_type"), bool(fsdp_block), bool(deepspeed_block))
    reader.fsdp(by_name.get("fsdp_config"), fsdp_block, kind)
    reader.deepspeed(by_name.get("deepspeed_config"), deepspeed_block, kind)
    reader.strategy(by_name.get("distributed_type"), kind)
    reader.parallelism(by_name.get("parallelism_config"), kind)


def _dialect_hint(name: str) -> str:
    if name in field_specs() or name in section_names():
        return "; it is a key of accel_trainer's own files, and this one is an accelerate file: use one of the two"
    return ""


class _Reader:
    """Translates the parts of one accelerate file into one layer."""

    def __init__(self, document: Document, layer: Layer) -> None:
        self.document = document
        self.layer = layer

    def subject(self, key: Key, section: str = "") -> str:
        prefix = f"{section}." if section else ""
        return f"{prefix}{key.name}{self.document.at(key.line)}"

    def put(self, path: str, key: Key, value: Any, text: str | None = None, section: str = "") -> None:
        where = self.document.where(key.line)
        self.layer.put(path, value, where=where, subject=self.subject(key, section), text=text)

    def refuse(self, key: Key, node: Node, way_out: str, section: str = "") -> None:
        shown = show(node.plain())
        self.layer.problems.append(f"{self.subject(key, section)} is {shown}, which is not offered: {way_out}")

    def wrong(self, key: Key, node: Node, expected: str, hint: str = "", section: str = "") -> None:
        shown = show(node.plain())
        self.layer.problems.append(f"{self.subject(key, section)} is {shown}; expected {expected}{hint}")

    def section(self, item: tuple[Key, Node] | None) -> dict[Key, Node]:
        """Return the content of a nested block; null is an empty one."""
        if item is None or item[1].value is None:
            return {}
        key, node = item
        if not isinstance(node.value, dict):
            self.wrong(key, node, "a block of keys, or null")
            return {}
        return node.value

    def legacy(self, fp16: Any, backend: Any, has_precision: bool) -> None:
        """Read the two top-level keys of old files."""
        if fp16 is not None and not has_precision and not is_neutral(fp16[1].plain()):
            self.put("mixed_precision", fp16[0], "fp16")
        if backend is not None and backend[1].value is not None:
            self.put("compile.backend", backend[0], backend[1].plain(), backend[1].text)

    def dynamo(self, block: Mapping[Key, Node]) -> None:
        for key, node in block.items():
            bare = key.name.removeprefix("dynamo_")
            if bare not in _DYNAMO:
                self.unknown(key, "dynamo_config", [f"dynamo_{name}" for name in _DYNAMO])
            else:
                self.put(_DYNAMO[bare], key, node.plain(), node.text, "dynamo_config")

    def unknown(self, key: Key, section: str, known: list[str]) -> None:
        hint = did_you_mean(key.name, known)
        self.layer.problems.append(f"unknown key {key.name!r} in {section!r}{self.document.at(key.line)}{hint}")

    def distributed_type(self, item: tuple[Key, Node] | None, has_fsdp: bool, has_deepspeed: bool) -> str | None:
        """Return the distributed type the file means, None if it says nothing or something unusable."""
        if item is None or item[1].value is None:
            return "FSDP" if has_fsdp else "DEEPSPEED" if has_deepspeed else None
        key, node = item
        # An unquoted NO arrives as false; there is nothing else that false could mean here.
        kind = "NO" if node.value is False else str(node.value).upper()
        if kind in _DISTRIBUTED_TYPES:
            return kind
        if kind in ("XLA", "TPU", "MEGATRON_LM"):
            self.refuse(key, node, "use FSDP, DEEPSPEED, MULTI_GPU, MULTI_CPU or NO")
        else:
            self.wrong(key, node, f"one of {', '.join(_DISTRIBUTED_TYPES)}", did_you_mean(kind, _DISTRIBUTED_TYPES))
        return None

    def fsdp(self, item: tuple[Key, Node] | None, block: Mapping[Key, Node], kind: str | None) -> None:
        # A block that is not used is still checked, in a layer of its own.
        layer = self.layer if kind in ("FSDP", None) else Layer(self.layer.kind, lenient=True)
        entries = fsdp_dialect.entries_of(self.document, block, layer, "fsdp_config")
        if entries:
            fsdp_dialect.translate_entries(entries, layer, source_name=self.document.name, default_version=1)
        if item is not None and block and layer is not self.layer:
            self.layer.problems.extend(layer.problems)
            self.layer.notes.append(f"{self.subject(item[0])} is not used: distributed_type is {kind}")

    def deepspeed(self, item: tuple[Key, Node] | None, block: dict[Key, Node], kind: str | None) -> None:
        """Keep the block as written; what it means is said in `deepspeed_block`."""
        check_fields(self.document, "deepspeed_config", block, self.layer)
        if item is None or not block:
            return
        if kind == "DEEPSPEED":
            block = dict(block)
            plain = {key.name: node.plain() for key, node in block.items()}
            steps = next((key for key in block if key.name == "gradient_accumulation_steps"), None)
            has_file = named_file(plain) is not None
            if steps is not None and not has_file and str(plain[steps.name]).lower() not in ("auto", "none"):
                node = block.pop(steps)
                self.put("accumulation.num_steps", steps, node.plain(), node.text, "deepspeed_config")
            has_stage = any(plain.get(name) is not None for name in ("zero_stage", "zero_optimization"))
            if is_whole(plain) and not has_file and not has_stage:
                block[Key("zero_stage", item[0].line)] = Node(2, item[0].line)  # accelerate's default
            put_document_block(self.document, item[0], Node(block, item[1].line), self.layer)
        elif kind is not None:
            self.layer.notes.append(f"{self.subject(item[0])} is not used: distributed_type is {kind}")

    def strategy(self, item: tuple[Key, Node] | None, kind: str | None) -> None:
        if kind is None or "strategy" in self.layer.settings:  # NO_SHARD has chosen already
            return
        key = item[0] if item is not None else Key("distributed_type", self.document.root.line)
        name = {"NO": "single", "FSDP": "fsdp2", "DEEPSPEED": "deepspeed"}.get(kind, "ddp")
        num_processes = self.layer.settings.get("launch.num_processes")
        if name == "ddp" and num_processes is not None and num_processes.value == 1:
            name = "auto"
        self.put("strategy", key, name)
        if kind == "MULTI_CPU" and "use_cpu" not in self.layer.settings:
            self.put("use_cpu", key, True)

    def parallelism(self, item: tuple[Key, Node] | None, kind: str | None) -> None:
        sizes: dict[str, tuple[str, str, int]] = {}
        for key, node in self.section(item).items():
            bare = key.name.removeprefix("parallelism_config_")
            if bare in _PARALLEL_SIZES:
                subject = self.subject(key, "parallelism_config")
                size = node.value if node.value is not None else 1
                if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                    self.wrong(key, node, "a whole number of at least 1", section="parallelism_config")
                else:
                    sizes[bare] = (subject, self.document.where(key.line), size)
            elif bare not in _PARALLEL_DETAILS:
                self.unknown(
                    key, "parallelism_config", [f"parallelism_config_{n}" for n in _PARALLEL_SIZES + _PARALLEL_DETAILS]
                )
        put_parallelism(sizes, self.layer, is_fsdp=kind == "FSDP")


def put_parallelism(sizes: Mapping[str, tuple[str, str, int]], layer: Layer, *, is_fsdp: bool) -> None:
    """Map the sizes of accelerate's ParallelismConfig; each is given as (subject, where, size)."""
    for name, (subject, where, size) in sizes.items():
        if size == 1:
            continue
        if name == "dp_replicate_size" and is_fsdp:
            layer.put("fsdp.replicate_size", size, where=where, subject=subject)
        elif name == "dp_shard_size" and not is_fsdp:
            layer.problems.append(f"{subject} is {size}, which needs distributed_type: FSDP; set that, or a size of 1")
        elif name not in ("dp_replicate_size", "dp_shard_size"):
            layer.problems.append(
                f"{subject} is {size}, which is not offered: set it to 1, and shard with FSDP instead"
            )
    num_processes = layer.settings.get("launch.num_processes")
    if is_fsdp and num_processes is not None and {"dp_replicate_size", "dp_shard_size"} <= sizes.keys():
        product = sizes["dp_replicate_size"][2] * sizes["dp_shard_size"][2]
        if product != num_processes.value:
            layer.problems.append(
                f"{sizes['dp_shard_size'][0]} x dp_replicate_size makes {product} processes, num_processes is "
                f"{num_processes.value}; the product of the sizes is the number of processes"
            )
