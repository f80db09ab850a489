"""The questions of `accel-trainer config`: in a terminal with arrow keys, line by line through a pipe or a dumb one."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_trainer.config import FieldSpec, field_specs, resolve, to_file_dict
from accel_trainer.config.description import documentation
from accel_trainer.config.schema import set_key, thaw
from accel_trainer.config.validation import COMPILE_MODES, WrongValueError, coerce
from accel_trainer.config.yaml_reader import dump_yaml
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.launch.config_file import accelerate_config_path
from accel_trainer.launch.flags import launch_flags
from accel_trainer.launch.machine import count_devices
from accel_trainer.runtime.launchers import DEFAULT_PORT

_BACK, _EXPLAIN = "<", "?"
_NONE = "none"
_YES_NO = {"yes": "", "no": ""}
_STRATEGIES = {
    "auto": "ddp where there are several processes, else one process",
    "ddp": "the whole model on each process",
    "fsdp2": "the model in shards, by PyTorch",
    "deepspeed": "the model in shards, by DeepSpeed's ZeRO",
    "single": "one process",
}
_PRECISIONS = {
    "no": "32 bits throughout",
    "bf16": "16 bits with the range of 32; no loss scale",
    "fp16": "16 bits with a loss scale, for GPUs without bf16",
    "fp8": "linear layers in 8 bits, on GPUs that have them; needs torchao",
}
_ON_CPU = {word: text for word, text in _PRECISIONS.items() if word in ("no", "bf16")}
_BACKENDS = {"no": "run as written", "inductor": "fuse and compile", "aot_eager": "to debug", "eager": "to debug"}
_RENDEZVOUS = {
    "static": "each machine has its number, and says for whom it waits",
    "c10d": "torch's own, which restarts on several machines; listens on every interface",
}
_WRAP_POLICIES = {
    "transformer": "each transformer layer",
    "size": "modules of a number of parameters",
    "none": "the whole model",
}
_STATES = {"full": "one file", "sharded": "a file for each rank"}
_DEVICES = {"none": "on the device", "cpu": "in host memory", "nvme": "in files on a local disk"}
_LAUNCHERS = {
    "standard": "`accel-trainer launch` by hand on each machine",
    "pdsh": "DeepSpeed's runner, by ssh",
    "openmpi": "DeepSpeed's runner, by mpirun",
    "mpich": "DeepSpeed's runner, by mpirun",
    "slurm": "DeepSpeed's runner, by srun",
}


class _BackError(Exception):
    """The question before this one is asked again."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question, whose answer is text that `parse` takes."""

    key: str
    text: str
    parse: Callable[[str], Any]
    """Returns the value; raises WrongValueError or ConfigError, in the words that the person reads."""
    default: str | None = None
    """Taken by an empty answer; None wants an answer."""
    choices: Mapping[str, str] | None = None
    """Every answer, with a few words on it."""
    explanation: str = ""

    def problem(self, answer: str) -> str:
        """Return why an answer does not fit, or nothing."""
        try:
            self.parse(answer)
        except WrongValueError as error:
            return f"{answer!r} does not fit: expected {error.expected}{error.hint}"
        except ConfigError as error:
            return f"{answer!r} does not fit: {error}"
        return ""


class Interview:
    """The answers so far, asked by `read` until they fit. Going back asks the last again, its answer the default."""

    def __init__(self, read: Callable[[Question], str]) -> None:
        self._read = read
        self._answers: list[str] = []
        self._earlier: dict[str, str] = {}
        self._position = 0
        self.content: dict[str, Any] = {}
        """The answers to `option`, as a file of ours has them."""

    def run(self, questions: Callable[[Interview], Any]) -> Any:
        """Call a function that asks, from its beginning whenever the person goes back; return its value."""
        while True:
            self._position, self.content = 0, {}
            try:
                return questions(self)
            except _BackError:
                if self._answers:
                    self._answers.pop()

    def _ask(self, question: Question) -> Any:
        """Return the value of an answer: one that is there already, or a new one."""
        if self._position == len(self._answers):
            earlier = self._earlier.get(question.key)
            if earlier is not None and not question.problem(earlier):
                question = dataclasses.replace(question, default=earlier)
            answer = self._read(question)
            self._answers.append(answer)
            self._earlier[question.key] = answer
        self._position += 1
        return question.parse(self._answers[self._position - 1])

    def option(
        self,
        path: str,
        text: str,
        default: str | None = "",
        choices: Mapping[str, str] | None = None,
        check: Callable[[Any], str | None] | None = None,
        parse: Callable[[str], Any] | None = None,
    ) -> Any:
        """Ask for an option of the configuration, put the answer into `content`, and return it; None is left out.

        Args:
            path: of the option, or of a key of the DeepSpeed block.
            default: `none` stands for None; empty takes the option's own.
            check: returns the expected values where one does not fit the answers before it.
            parse: returns the value of an answer, where the option's type does not say enough.
        """
        spec = field_specs().get(path) or _spec_of_block(path)
        default = _shown(spec.default) if default == "" else default
        choices = _YES_NO if spec.annotation is bool else choices

        def read(answer: str) -> Any:
            if answer == _NONE and default == _NONE and (choices is None or _NONE not in choices):
                return spec.default
            if choices and choices is not _YES_NO and answer.lower() not in choices:
                raise WrongValueError(f"one of {', '.join(choices)}", did_you_mean(answer, choices))
            value = parse(answer) if parse else coerce(spec, answer, lenient=True)
            if check is not None and (expected := check(value)) is not None:
                raise WrongValueError(expected)
            return value

        flag = launch_flags().get(path.rpartition(".")[2])
        explanation = documentation().get(path) or (flag.help if flag else "")
        value = self._ask(Question(path, text, read, default, choices, explanation))
        if value is not None:
            set_key(self.content, path, thaw(value))
        return value

    def confirm(self, key: str, text: str, default: str) -> bool:
        """Return whether the answer is yes."""
        parse = functools.partial(coerce, FieldSpec(key, bool, False), lenient=True)
        return bool(self._ask(Question(key, text, parse, default, _YES_NO)))


def _spec_of_block(path: str) -> FieldSpec:
    is_switch = launch_flags()[path.removeprefix("deepspeed.")].is_switch
    return FieldSpec(path, bool if is_switch else str, None)


def _shown(value: Any) -> str:
    """Return a value as an answer that stands for it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _NONE if value in (None, ()) else str(value)


# --- how a question is asked ------------------------------------------------------------------------------------------


def _read_line(question: Question) -> str:
    words = f" ({', '.join(question.choices)})" if question.choices and question.choices is not _YES_NO else ""
    shown = "" if question.default is None else f" [{question.default}]"
    while True:
        answer = input(f"{question.text}{words}{shown}: ").strip()
        if answer == _BACK:
            raise _BackError
        if answer == _EXPLAIN:
            print(f"  {_explain(question)}")
        elif not answer and question.default is None:
            print("  this one has no default: please answer")
        elif problem := question.problem(answer) if answer else "":
            print(f"  {problem}")
        else:
            return answer or str(question.default)


def _explain(question: Question) -> str:
    choices = (f"{word}: {text}" for word, text in (question.choices or {}).items() if text)
    return " ".join(filter(None, [question.explanation, "; ".join(choices)])) or question.text


def _read_in_terminal(question: Question) -> str:
    from prompt_toolkit import prompt
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.shortcuts import choice
    from prompt_toolkit.validation import ValidationError, Validator

    class Answer(Validator):
        def validate(self, document: Any) -> None:
            answer = document.text.strip()
            problem = question.problem(answer) if answer else "" if question.default is not None else "please answer"
            if problem:
                raise ValidationError(len(document.text), problem)

    keys, toolbar = KeyBindings(), question.explanation or None
    keys.add("escape", eager=True)(lambda event: event.app.exit(exception=_BackError()))
    if question.choices:
        width = max(map(len, question.choices))
        words = [(word, f"{word:<{width}}  {text}".rstrip()) for word, text in question.choices.items()]
        return choice(question.text, options=words, default=question.default, key_bindings=keys, bottom_toolbar=toolbar)
    shown = f"{question.text}: " if question.default is None else f"{question.text} [{question.default}]: "
    answer = prompt(shown, validator=Answer(), validate_while_typing=True, key_bindings=keys, bottom_toolbar=toolbar)
    return answer.strip() or str(question.default)


# --- what is asked ----------------------------------------------------------------------------------------------------


def ask_configuration(interview: Interview) -> dict[str, Any]:
    """Ask for a configuration, and return the answers as a file of ours has them."""
    use_cpu = interview.option("use_cpu", "Run on the CPU although there may be a GPU?")
    num_machines = interview.option("launch.num_machines", "How many machines?")
    _ask_strategy(interview, num_machines)
    _ask_numbers(interview, _ON_CPU if use_cpu else _PRECISIONS)
    _ask_compile(interview)
    if interview.confirm("more", "Set CPU threads, core binding, or checks of collectives?", "no"):
        text = "CPU threads of each process; none: a share of the cores?"
        interview.option("launch.num_cpu_threads_per_process", text)
        interview.option("launch.enable_cpu_affinity", "Bind each process to cores of its own?")
        interview.option("debug", "Check before each collective that all ranks call it alike? Slower")
    return interview.content


def _ask_strategy(interview: Interview, num_machines: int) -> None:
    """Ask how the model is laid out, and then for machines, processes and the strategy's own options."""
    strategies = {word: text for word, text in _STRATEGIES.items() if word != "single" or num_machines == 1}
    strategy = interview.option("strategy", "How is the model laid out?", "auto", strategies)
    asks_for_hosts = _ASK_FOR_HOSTS.get(strategy)
    if num_machines == 1 or asks_for_hosts is None or not asks_for_hosts(interview):
        if num_machines > 1:
            _ask_machines(interview, num_machines)
        if strategy != "single":
            _ask_processes(interview, strategy, num_machines)
    if strategy in _ASK_MORE:
        _ASK_MORE[strategy](interview)


def _ask_numbers(interview: Interview, precisions: Mapping[str, str]) -> None:
    """Ask for precision and accumulation, which a configuration of an engine's own may have answered."""
    content = interview.content
    answered = resolve(file={name: content[name] for name in _OF_ENGINE if name in content})
    if "fp8" in precisions and (
        content["strategy"] == "deepspeed" or content.get("parallel", {}).get("tp_size", 1) > 1
    ):
        precisions = {word: text for word, text in precisions.items() if word != "fp8"}  # neither computes in it
    if not answered.is_set("mixed_precision"):
        interview.option("mixed_precision", "Mixed precision?", choices=precisions)
    if not answered.is_set("accumulation.num_steps"):
        interview.option("accumulation.num_steps", "Micro-batches for each update (gradient accumulation)?")


def _ask_machines(interview: Interview, num_machines: int) -> None:
    def is_one_of_them(number: int) -> str | None:
        return None if 0 <= number < num_machines else f"a number from 0 to {num_machines - 1}"

    interview.option("launch.machine_rank", "Which of them is this one? 0 has the main process", check=is_one_of_them)
    interview.option("launch.main_process_ip", "Address of machine 0, as the others reach it?", None)
    interview.option("launch.main_process_port", "Port on machine 0?", str(DEFAULT_PORT))
    interview.option("launch.rdzv_backend", "How do the machines meet?", choices=_RENDEZVOUS)


def _ask_processes(interview: Interview, strategy: str, num_machines: int) -> None:
    def fits(number: int) -> str | None:
        return f"a multiple of the {num_machines} machines" if number % num_machines else None

    use_cpu = interview.content["use_cpu"]
    gpu_ids = "all" if use_cpu else interview.option("launch.gpu_ids", "Which GPUs, by number with commas?")
    devices = count_devices(use_cpu, gpu_ids)
    default = (devices or (1 if strategy == "auto" else 2)) * num_machines
    interview.option("launch.num_processes", "How many processes, over all machines?", str(default), check=fits)


def _ask_fsdp(interview: Interview) -> None:
    text = "Free gathered parameters after the forward? Less memory, more communication"
    interview.option("fsdp.reshard_after_forward", text)
    policy = interview.option("fsdp.wrap_policy", "What is gathered at once?", choices=_WRAP_POLICIES)
    if policy == "transformer":
        interview.option("fsdp.wrap_classes", "Class names of the layers, with commas; none: the model's own")
    elif policy == "size":
        interview.option("fsdp.min_num_params", "Fewest parameters of such a module?")
    text = "Compute activations again in the backward, to save memory?"
    interview.option("fsdp.activation_checkpointing", text)
    interview.option("fsdp.offload_params", "Keep parameters and optimizer state in CPU memory?")
    text = "Read a checkpoint once instead of on each rank (cpu_ram_efficient_loading)?"
    interview.option("fsdp.cpu_ram_efficient_loading", text)
    interview.option("fsdp.state_dict_type", "Optimizer state in the Trainer's checkpoints?", choices=_STATES)
    _ask_mesh(interview, interview.content["launch"]["num_processes"])


def _ask_mesh(interview: Interview, num_processes: int) -> None:
    """Ask how the processes are divided, where there are several ways to do it."""
    if all(num_processes % size for size in range(2, num_processes)):
        return

    def divides(size: int) -> str | None:
        return f"a divisor of the {num_processes} processes" if num_processes % size else None

    def leaves_shards(size: int) -> str | None:
        rest = num_processes // tp_size
        return f"a divisor of {rest}, and smaller" if rest % size or size == rest > 1 else None

    text = "How many processes share the matrices of a layer (tensor parallelism)?"
    tp_size = interview.option("parallel.tp_size", text, check=divides)
    if tp_size < num_processes:
        text = "How many replicas of the model (hybrid sharding)? 1 shards over all processes"
        interview.option("parallel.dp_replicate_size", text, "1", check=leaves_shards)


def _ask_hostfile(interview: Interview) -> bool:
    """Ask for the launcher of a DeepSpeed job on several machines; return whether a hostfile names them."""
    text = "What starts the machines?"
    path = "deepspeed.deepspeed_multinode_launcher"
    launcher = interview.option(path, text, "standard", _LAUNCHERS, parse=str.lower)
    if launcher == "standard":
        del interview.content["deepspeed"]
        return False
    text = "The hostfile, with a line `name slots=N` for each machine?"
    interview.option("deepspeed.deepspeed_hostfile", text, None, parse=_existing)
    for kind, purpose in (("inclusion", "use"), ("exclusion", "leave out")):
        text = f"Machines and slots to {purpose}, as host1@host2:0,2?"
        chosen = interview.option(f"deepspeed.deepspeed_{kind}_filter", text)
        if chosen:
            break
    return True


def _ask_deepspeed(interview: Interview) -> None:
    text = "A configuration file of DeepSpeed's own?"
    file = interview.option("deepspeed.deepspeed_config_file", text, parse=_deepspeed_file)
    if file is not None:
        return
    stages = {"1": "shards optimizer state", "2": "gradients too", "3": "parameters too"}
    is_whole = interview.option("deepspeed.zero_stage", "ZeRO stage?", "2", stages, parse=int) == 3
    _ask_offload(interview, "optimizer", "Where is optimizer state kept between uses?", with_disk=is_whole)
    if is_whole:
        _ask_offload(interview, "param", "Where are parameters kept between uses?", with_disk=True)
        interview.option("deepspeed.zero3_init_flag", "Partition parameters while the model is built?", "no")
        interview.option(
            "deepspeed.zero3_save_16bit_model", "Gather the weights in 16 bits when a model is saved?", "yes"
        )
        text = "Class names of mixture-of-experts layers, with commas?"
        interview.option("deepspeed.deepspeed_moe_layer_cls_names", text)
    interview.option("deepspeed.gradient_clipping", "Bound of the gradient norm?", parse=_parse_bound)


def _ask_offload(interview: Interview, name: str, text: str, *, with_disk: bool) -> None:
    devices = {word: where for word, where in _DEVICES.items() if word != "nvme" or with_disk}
    device = interview.option(f"deepspeed.offload_{name}_device", text, "none", devices, parse=str.lower)
    if device == "nvme":
        path = f"deepspeed.offload_{name}_nvme_path"
        interview.option(path, "A folder on that disk?", None, parse=functools.partial(_existing, kind="folder"))


def _ask_compile(interview: Interview) -> None:
    backend = interview.option("compile.backend", "Compile the model (torch.compile)?", choices=_BACKENDS)
    if backend == "no" or not interview.confirm("compile", "Change how it is compiled?", "no"):
        return
    interview.option("compile.mode", "Mode?", choices=dict.fromkeys(COMPILE_MODES, ""))
    interview.option("compile.fullgraph", "Is a graph break an error?")
    interview.option("compile.dynamic", "For changing shapes (true, false; none: as torch finds out)?")
    text = "Each repeated block once instead of the whole model (true, false; none: under fsdp2)?"
    interview.option("compile.regional", text)


_OF_ENGINE = ("strategy", "deepspeed")
_ASK_FOR_HOSTS: Mapping[str, Callable[[Interview], bool]] = {"deepspeed": _ask_hostfile}
_ASK_MORE: Mapping[str, Callable[[Interview], None]] = {"fsdp2": _ask_fsdp, "deepspeed": _ask_deepspeed}
"""Questions of a strategy's own: for machines that it starts itself, and for its options."""


# --- answers that are no option of the tree ---------------------------------------------------------------------------


def _existing(answer: str, kind: str = "file") -> str:
    path = Path(answer).expanduser().absolute()
    if not (path.is_file() if kind == "file" else path.is_dir()):
        raise WrongValueError(f"a {kind} that exists")
    return str(path)


def _deepspeed_file(answer: str) -> str:
    path = _existing(answer)
    resolve(file={"strategy": "deepspeed", "deepspeed": {"deepspeed_config_file": path}})
    return path


def _parse_bound(answer: str) -> float:
    try:
        bound = float(answer)
    except ValueError:
        bound = 0.0
    if not 0 < bound < float("inf"):
        raise WrongValueError("a number above 0")
    return bound


# --- the command ------------------------------------------------------------------------------------------------------


def ask_answers(path: Path) -> dict[str, Any]:
    """Ask on the terminal for the configuration to write to `path`, and return it, checked."""
    print(f"Answers go to {path}.")
    offered = _offered_values(path)

    def questions(interview: Interview) -> dict[str, Any]:
        if path.exists() and not interview.confirm("replace", "That file exists. Replace it?", "no"):
            raise ConfigError(f"{path} exists and was left as it is; name another file with --config_file")
        if offered and interview.confirm("import", "Take these values, and ask nothing?", "yes"):
            return offered
        return ask_configuration(interview)

    if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        print("Enter takes the answer, escape goes back, ctrl-C ends without a file.")
        read = _read_in_terminal
    else:
        print(f"An empty answer takes what stands in brackets, {_EXPLAIN} explains, {_BACK} goes back.")
        read = _read_line
    try:
        content: dict[str, Any] = Interview(read).run(questions)
    except EOFError:
        raise ConfigError("the input ended before the last answer; nothing was written, start again") from None
    resolve(file=content)
    return content


def _offered_values(path: Path) -> dict[str, Any]:
    """Print the values of accelerate's default file, and return them as a file of ours has them; or nothing."""
    other = None if path.exists() else accelerate_config_path(os.environ)
    if other is None:
        return {}
    try:
        content = to_file_dict(resolve(file=str(other)).config)
    except ConfigError as error:
        print(f"The configuration of Hugging Face accelerate, {other}, cannot be taken over: {error}")
        return {}
    print(f"Hugging Face accelerate is configured in {other}:\n{dump_yaml(content)}")
    return content
