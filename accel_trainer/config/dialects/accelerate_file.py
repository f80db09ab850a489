"""The file of `accelerate config`: every key is mapped, accepted without effect, or refused with the way out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from accel_trainer.config.deepspeed_block import ACCELERATE_FIELDS, is_complete, named_file, put_document_block
from accel_trainer.config.deepspeed_keys import KNOWN_KEYS as DEEPSPEED_KEYS
from accel_trainer.config.dialects.fsdp import entries_of, is_neutral, translate_entries
from accel_trainer.config.document import Document, Entry, Key, Node
from accel_trainer.config.layer import Layer, SourceKind
from accel_trainer.config.schema import field_specs, section_names
from accel_trainer.config.validation import show
from accel_trainer.errors import did_you_mean

_DIRECT = {
    "mixed_precision": "mixed_precision",
    "use_cpu": "use_cpu",
    "debug": "debug",
    "gradient_accumulation_steps": "accumulation.num_steps",
    "dataset_mixture": "dataset_mixture",  # of ours: accelerate has no data sets
    "dynamo_backend": "compile.backend",  # of old files, which accelerate 1.15 still converts (config_args.py)
    # The options of the launcher have accelerate's names, but for the unit in one of them.
    **{
        path.removeprefix("launch.").removesuffix("_seconds"): path
        for path in field_specs()
        if path.startswith("launch.")
    },
}
_TPU_KEYS = (
    "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env", "commands", "command_file",
)  # fmt: skip
_OF_OTHER_ENGINES = {
    "downcast_bf16": "it exists on TPUs only; use mixed_precision: bf16",
    "mpirun_config": "start the script with mpirun itself, the ranks are detected; remove the block",
    "ipex_config": "Intel's extension is not used, PyTorch has it built in; remove the block",
}
_NOT_OFFERED = {
    **dict.fromkeys(_TPU_KEYS, "chips are found where torch-tpu is; remove the TPU keys"),
    **_OF_OTHER_ENGINES,
}
DYNAMO = {
    "backend": "compile.backend",
    "mode": "compile.mode",
    "use_fullgraph": "compile.fullgraph",
    "use_dynamic": "compile.dynamic",
    "use_regional_compilation": "compile.regional",
}
"""Options of `torch.compile`: `dynamo_backend` in files and flags, `ACCELERATE_DYNAMO_BACKEND` as a variable."""
PARALLEL_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "ep_size")
PARALLEL_COMM = "cp_comm_strategy"
PARALLEL_DETAILS = (
    "cp_backend", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation",
)  # fmt: skip
_BACKENDS = {"cp_backend": ("torch",), "sp_backend": ("deepspeed", "ulysses")}
"""The backends that ways to share sequences have in accelerate's files; each has but one here."""
FP8 = {
    "backend": "fp8.backend",
    "enable_fsdp_float8_all_gather": "fp8.enable_fsdp_float8_all_gather",
    "pad_inner_dim": "fp8.pad_inner_dim",
}
"""Options of fp8 by torchao: `fp8_config` in files, `--fp8_...` as flags and `ACCELERATE_FP8_...` as variables."""
_FP8_OF_OTHERS = (
    "use_autocast_during_eval", "margin", "interval", "fp8_format", "amax_history_len", "amax_compute_algo",
    "override_linear_precision", "use_mxfp8_block_scaling", "opt_level",
)  # fmt: skip
_MEGATRON_LM = {
    "pp_degree": "there are no pipelines; set it to 1",
    "num_micro_batches": "they are those of pipelines; set it to 1, and gradient_accumulation_steps",
    "context_parallel_size": "set it to 1; cp_size and sp_size in parallelism_config share sequences, beside tp_size",
    "sequence_parallelism": "set it to false; sp_size in parallelism_config shares sequences, beside tp_size",
    "expert_model_parallel_size": "set it to 1; ep_size in parallelism_config shares experts, without a tp_degree",
    "gradient_clipping": "remove it, and clip in the script (clip_grad_norm_) or with max_grad_norm",
    "recompute_activations": "set it to false, and use distributed_type FSDP with fsdp_activation_checkpointing",
}
"""Options of `megatron_lm_config` that ask for something else than `tp_degree` does, each with what to do."""
_SECTIONS = tuple(f"{name}_config" for name in ("fsdp", "deepspeed", "dynamo", "parallelism", "fp8", "megatron_lm"))
_SPECIAL = ("compute_environment", "distributed_type", "fp16", *_SECTIONS)
_DISTRIBUTED_TYPES = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU",
    "MULTI_NEURON", "FSDP", "DEEPSPEED",
)  # fmt: skip

MARKER_KEYS = frozenset({"compute_environment", "distributed_type", *_SECTIONS, *_OF_OTHER_ENGINES})
"""Keys that only an accelerate file has; one of them decides the dialect."""
KNOWN_KEYS = frozenset({*_DIRECT, *_NOT_OFFERED, *_SPECIAL})
"""Every top-level key of an accelerate file."""


def translate(document: Document, content: Mapping[Key, Node], layer: Layer) -> None:
    """Put an accelerate file into the layer."""
    _Reader(document, content, layer).read()


def _unknown_hint(name: str) -> str:
    if name in field_specs() or name in section_names():
        return "; it is a key of accel_trainer's own files, and this one is an accelerate file: use one of the two"
    return did_you_mean(name, KNOWN_KEYS)


class _Reader:
    """Translates the keys and the blocks of one accelerate file into one layer."""

    def __init__(self, document: Document, content: Mapping[Key, Node], layer: Layer) -> None:
        self.document = document
        self.layer = layer
        self.entries = {key.name: document.entry(key, node) for key, node in content.items()}
        self.keys = {key.name: key for key in content}
        blocks = {key.name: node.value for key, node in content.items() if isinstance(node.value, dict)}
        self.blocks: dict[str, dict[Key, Node]] = {name: blocks.get(name, {}) for name in _SECTIONS}

    def read(self) -> None:
        """Translate all of the file, unless it is for SageMaker."""
        environment = self.entries.get("compute_environment")
        if environment is not None and environment.value == "AMAZON_SAGEMAKER":
            self.layer.refuse(environment, "start the job with SageMaker's own tools and a file for LOCAL_MACHINE")
            return
        for name, entry in self.entries.items():
            self.key(name, entry)
        # A key of old files, which accelerate 1.15 still converts (config_args.py).
        fp16 = self.entries.get("fp16")
        if fp16 is not None and "mixed_precision" not in self.entries and not is_neutral(fp16.value):
            self.layer.put("mixed_precision", fp16, "fp16")
        self.dynamo()
        self.fp8()
        kind = self.distributed_type()
        self.fsdp(kind)
        self.deepspeed(kind)
        self.parallelism()
        self.megatron_lm(kind)
        self.strategy(kind)

    def key(self, name: str, entry: Entry) -> None:
        """Translate a key that depends on no other, and check the others."""
        if name in _DIRECT:
            # -1 is ClusterConfig's default, for a number that the launch command gives (accelerate 1.15).
            if name != "num_processes" or entry.value != -1:
                self.layer.put(_DIRECT[name], entry)
        elif name in _NOT_OFFERED:
            if not is_neutral(entry.value):
                self.layer.refuse(entry, _NOT_OFFERED[name])
        elif name in _SECTIONS:
            if not isinstance(entry.value, dict | None):
                self.layer.wrong(entry, "a block of keys, or null")
        elif name == "compute_environment":
            if entry.value not in (None, "LOCAL_MACHINE"):
                self.layer.wrong(entry, "LOCAL_MACHINE")
        elif name not in _SPECIAL:
            self.layer.problems.append(self.document.unknown_key_problem(self.keys[name], _unknown_hint(name)))

    def unknown(self, key: Key, section: str, known: Iterable[str]) -> None:
        hint = did_you_mean(key.name, known)
        self.layer.problems.append(self.document.unknown_key_problem(key, hint, section))

    def unused(self, section: str, kind: str) -> None:
        subject = self.entries[section].subject
        self.layer.notes.append(f"{subject} is not used: distributed_type is {kind}")

    def dynamo(self) -> None:
        for key, node in self.blocks["dynamo_config"].items():
            bare = key.name.removeprefix("dynamo_")
            if bare in DYNAMO:
                self.layer.put(DYNAMO[bare], self.document.entry(key, node, "dynamo_config"))
            else:
                self.unknown(key, "dynamo_config", [f"dynamo_{name}" for name in DYNAMO])

    def fp8(self) -> None:
        for key, node in self.blocks["fp8_config"].items():
            entry = self.document.entry(key, node, "fp8_config")
            if key.name in FP8:
                self.layer.put(FP8[key.name], entry)
            elif key.name not in _FP8_OF_OTHERS:
                self.unknown(key, "fp8_config", FP8)
            elif not is_neutral(entry.value):
                self.layer.refuse(entry, "it is an option of TransformerEngine or MS-AMP; use backend: AO without it")

    def distributed_type(self) -> str | None:
        """Return the distributed type of the file, None if it has none or an unusable one."""
        entry = self.entries.get("distributed_type")
        if entry is None or entry.value is None:
            return "FSDP" if self.blocks["fsdp_config"] else "DEEPSPEED" if self.blocks["deepspeed_config"] else None
        # An unquoted NO arrives as false; there is nothing else that false could mean here.
        kind = "NO" if entry.value is False else str(entry.value).upper()
        if kind in (*_DISTRIBUTED_TYPES, "MEGATRON_LM"):
            return kind
        if kind in ("XLA", "TPU"):
            self.layer.refuse(
                entry, "torch_xla ends at torch 2.9, and 2.11 is needed; with torch-tpu use FSDP, MULTI_GPU or NO"
            )
        else:
            hint = did_you_mean(kind, _DISTRIBUTED_TYPES)
            self.layer.wrong(entry, f"one of {', '.join(_DISTRIBUTED_TYPES)}", hint)
        return None

    def fsdp(self, kind: str | None) -> None:
        # A block that is not used is still checked, in a layer of its own.
        layer = self.layer if kind in ("FSDP", None) else Layer(self.layer.kind, lenient=True)
        block = self.blocks["fsdp_config"]
        entries = entries_of(self.document, block, layer, "fsdp_config")
        if entries:
            translate_entries(entries, layer, source_name=self.document.name, default_version=1)
        if block and kind is not None and layer is not self.layer:
            self.layer.problems.extend(layer.problems)
            self.unused("fsdp_config", kind)

    def deepspeed(self, kind: str | None) -> None:
        """Keep the block as written; `config.deepspeed_block` reads it."""
        section = "deepspeed_config"
        block, known = dict(self.blocks[section]), (*ACCELERATE_FIELDS, *DEEPSPEED_KEYS)
        for key in block:
            if key.name not in known:
                self.unknown(key, section, known)
        if not block or kind is None:
            return
        if kind != "DEEPSPEED":
            self.unused(section, kind)
            return
        key, content = self.keys[section], self.entries[section].value
        if named_file(content) is None:
            self.accumulation(block)
            has_stage = any(content.get(name) is not None for name in ("zero_stage", "zero_optimization"))
            if is_complete(content) and not has_stage:
                block[Key("zero_stage", key.line)] = Node(2, key.line)  # accelerate's default
        put_document_block(self.document, key, Node(block, key.line), self.layer)

    def accumulation(self, block: dict[Key, Node]) -> None:
        """Take accumulation out of a block whose other keys are accelerate's fields, too."""
        key = next((key for key in block if key.name == "gradient_accumulation_steps"), None)
        if key is not None and str(block[key].plain()).lower() not in ("auto", "none"):
            self.layer.put("accumulation.num_steps", self.document.entry(key, block.pop(key), "deepspeed_config"))

    def strategy(self, kind: str | None) -> None:
        if kind is None or "strategy" in self.layer.settings:  # NO_SHARD has chosen already
            return
        root = Key("distributed_type", self.document.root.line)
        entry = self.entries.get("distributed_type") or self.document.entry(root, Node(None))
        name = {"NO": "single", "FSDP": "fsdp2", "MEGATRON_LM": "fsdp2", "DEEPSPEED": "deepspeed"}.get(kind, "ddp")
        num_processes = self.layer.settings.get("launch.num_processes")
        if name == "ddp" and num_processes is not None and num_processes.value == 1:
            name = "auto"
        if name == "ddp" and (size := self.shared_size()):
            name = "fsdp2"
            self.layer.notes.append(f"{entry.subject} is {kind}, and {size}: strategy 'fsdp2' runs")
        self.layer.put("strategy", entry, name)
        if kind == "MULTI_CPU" and "use_cpu" not in self.layer.settings:
            self.layer.put("use_cpu", entry, True)

    def shared_size(self) -> str | None:
        """Return the size of an axis along which ranks compute a batch together, in words, where there is one."""
        sizes = {axis: self.layer.settings.get(f"parallel.{axis}_size") for axis in ("tp", "cp", "sp")}
        return next((f"{axis}_size is {size.value}" for axis, size in sizes.items() if size and size.value > 1), None)

    def megatron_lm(self, kind: str | None) -> None:
        """Take the degree of tensor parallelism; refuse the other options of Megatron-LM that ask for something."""
        section = "megatron_lm_config"
        block = self.blocks[section]
        if kind != "MEGATRON_LM":
            if not is_neutral({key.name: node.plain() for key, node in block.items()}) and kind is not None:
                self.unused(section, kind)
            return
        for key, node in block.items():
            entry, bare = self.document.entry(key, node, section), key.name.removeprefix("megatron_lm_")
            if bare == "tp_degree":
                put_parallelism({"tp_size": entry}, self.layer)
            elif bare == "use_distributed_optimizer":
                continue  # the optimizer's state is sharded in any case
            elif type(entry.value) is int and entry.value == 1 and bare != "gradient_clipping":
                continue  # a size of 1 asks for nothing
            elif not is_neutral(entry.value):
                self.layer.refuse(entry, _MEGATRON_LM.get(bare, "it is an option of Megatron-LM alone; remove it"))
        self.layer.notes.append(
            f"{self.entries['distributed_type'].subject} is MEGATRON_LM: models of Megatron-LM are not here; strategy "
            "'fsdp2' runs, with tensor parallelism by the model's own plan where megatron_lm_tp_degree is above 1"
        )

    def parallelism(self) -> None:
        sizes: dict[str, Entry] = {}
        for key, node in self.blocks["parallelism_config"].items():
            bare = key.name.removeprefix("parallelism_config_")
            entry = self.document.entry(key, node, "parallelism_config")
            if bare in (*PARALLEL_SIZES, PARALLEL_COMM):
                sizes[bare] = entry
            elif bare in _BACKENDS and entry.value not in (None, *_BACKENDS[bare]):
                self.layer.wrong(entry, " or ".join(map(repr, _BACKENDS[bare])))
            elif bare == "sp_attn_implementation" and not is_neutral(entry.value):
                self.layer.notes.append(
                    f"{entry.subject} is {show(entry.value)}, which is not used: the attention is that of the model; "
                    "load it with attn_implementation=..."
                )
            elif bare not in PARALLEL_DETAILS:
                known = [f"parallelism_config_{name}" for name in (*PARALLEL_SIZES, PARALLEL_COMM, *PARALLEL_DETAILS)]
                self.unknown(key, "parallelism_config", known)
        put_parallelism(sizes, self.layer)


def put_parallelism(entries: Mapping[str, Entry], layer: Layer) -> None:
    """Map the sizes of accelerate's ParallelismConfig, by name; null is a size of 1.

    All of 1 ask for nothing in a file, and take back those of a file elsewhere, but for the replicas and shards, which
    follow from the others.
    """
    sizes = _sizes_of({name: entry for name, entry in entries.items() if name != PARALLEL_COMM}, layer)
    asks = any(size > 1 for size in sizes.values())
    for name, size in sizes.items():
        if asks or layer.kind is not SourceKind.FILE and not name.startswith("dp_"):
            layer.put(f"parallel.{name}", entries[name], size)
    if PARALLEL_COMM in entries and entries[PARALLEL_COMM].value is not None and sizes.get("cp_size") != 1:
        layer.put(f"parallel.{PARALLEL_COMM}", entries[PARALLEL_COMM])


def _sizes_of(entries: Mapping[str, Entry], layer: Layer) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, entry in entries.items():
        size = 1 if entry.value is None else entry.value
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            layer.wrong(entry, "a whole number of at least 1")
        else:
            sizes[name] = size
    return sizes
