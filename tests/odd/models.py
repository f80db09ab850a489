"""Odd models, which an ordinary loop trains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.odd.loop import STEPS, Loop, odd


class Block(nn.Module):
    """Two layers beside a residual; a unit of sharding where its model has several."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    """Two blocks and a head: an ordinary model, for odd loops and as a base of odd models."""

    _no_split_modules: ClassVar = ["Block"]
    _tp_plan: ClassVar = {"blocks.*.first": "colwise", "blocks.*.second": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of what is trained, which no scale of gradients is lost on."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, **{"lr": 0.1, "momentum": 0.9, **options})


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def train(
    loop: Loop,
    model: nn.Module,
    optimizer: Any = None,
    loss_of: Callable[[Any], Tensor] = square,
    steps: Iterable[int] = range(STEPS),
) -> tuple[Any, Any]:
    """Prepare a model and its optimizer, train them by the outputs, and keep the weights; return both."""
    model, optimizer = loop.prepare(model, optimizer or sgd(model))
    for step in steps:
        loop.update(loss_of(model(loop.rows(step))), optimizer)
    loop.keep(model)
    return model, optimizer


def odd_model(title: str, **refused: str) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Put a model into the table, which an ordinary loop trains."""

    def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def run(loop: Loop) -> None:
            train(loop, build())

        run.__name__ = build.__name__
        odd(title, **refused)(run)
        return build

    return add


class Of(nn.Module):
    """A module whose forward is a function of it and the rows."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


MEMORY = "is a view of memory that ... has, too"
UNUSED = "took no part in this backward, and DDP exchanges no gradients before all have come"
COMPILED = "was given in a wrapper of torch.compile(module), and ZeRO-3 of DeepSpeed fails in one"
SPARSE = "cannot shard its sparse gradients"
HOOKS = "has hooks for its gradient"

# --- parameters -------------------------------------------------------------------------------------------------------


@odd("values that differ between ranks before prepare")
def unlike_values(loop: Loop) -> None:
    torch.manual_seed(loop.rank)
    train(loop, Net())


@odd_model("a module that is called twice")
def shared_module() -> nn.Module:
    return Of(lambda self, x: self.head(self.inner(self.inner(x))), inner=Block(), head=nn.Linear(4, 2))


class Tied(Net):
    """Weights of two units are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].first.weight = self.blocks[0].first.weight


@odd_model("weights tied across units")
def tied_units() -> nn.Module:
    return Tied()


@odd_model("an embedding tied to the head")
def tied_head() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding((x * 3).long().clamp(-4, 4) + 4))).mean(1)

    model = Of(forward, embedding=nn.Embedding(9, 4), inner=Block(), head=nn.Linear(4, 9, bias=False))
    model.head.weight = model.embedding.weight
    return model


@odd_model("a decoder tied by a transposed view", gathers=MEMORY)
def tied_by_view() -> nn.Module:
    model = Of(
        lambda self, x: self.decoder(torch.tanh(self.encoder(x))),
        encoder=nn.Linear(4, 6, bias=False),
        decoder=nn.Linear(6, 4, bias=False),
    )
    model.decoder.weight = nn.Parameter(model.encoder.weight.detach().t())
    return model


@odd_model("parameters that are slices of one memory", gathers=MEMORY)
def slices() -> nn.Module:
    memory = torch.randn(6, 4)
    model = Of(lambda self, x: x @ self.query.t() + x @ self.key.t(), query=nn.Parameter(memory[:4]))
    model.key = nn.Parameter(memory[2:])
    return model


@odd_model("frozen parameters")
def frozen() -> nn.Module:
    model = Net()
    model.blocks[0].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return model


@odd_model("one bias that is trained")
def one_bias() -> nn.Module:
    model = Net().requires_grad_(False)
    model.blocks[0].second.bias.requires_grad_(True)
    return model


@odd_model("parameters that no loss uses", ddp=UNUSED)
def unused() -> nn.Module:
    model = Net()
    model.spare = nn.Linear(4, 4)
    return model


@odd("unused parameters with weight decay")
def unused_decayed(loop: Loop) -> None:
    loop.begin(config={"ddp": {"find_unused_parameters": True}})
    model = Net()
    model.spare = nn.Linear(4, 4)
    train(loop, model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.5))


class Branching(Net):
    """Takes a branch in some steps: the same one on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 4)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return super().forward(self.other(x) if self.step % 2 else x)


@odd("a branch that is taken in some steps", ddp=UNUSED)
def branch(loop: Loop) -> None:
    train(loop, Branching())


@odd("the same with find_unused_parameters")
def branch_found(loop: Loop) -> None:
    loop.begin(config={"ddp": {"find_unused_parameters": True}})
    train(loop, Branching())


@odd("a branch that the rows of one rank take", ends=True, gathers="ranks use unlike parameters")
def branch_of_rows(loop: Loop) -> None:
    loop.begin(config={"ddp": {"find_unused_parameters": True}})

    def forward(self: Any, x: Tensor) -> Tensor:
        is_large = x[:, 0] > 0.7  # in each step of some ranks' rows only
        y = self.inner(x)
        return torch.where(is_large[:, None], self.other(x), y) if is_large.any() else y

    train(loop, Of(forward, inner=Block(), other=nn.Linear(4, 4)))


@odd_model("parameters used in evaluation only", ddp=UNUSED)
def used_in_evaluation() -> nn.Module:
    return Of(
        lambda self, x: self.inner(x) if self.training else self.calibration(self.inner(x)),
        inner=Block(),
        calibration=nn.Linear(4, 4),
    )


@odd_model("ParameterList and ParameterDict")
def lists_of_parameters() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.inner(x) * self.factors[0] * self.factors[1] + self.offsets["x"].mean()

    factors = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(1))])
    return Of(forward, inner=Block(), factors=factors, offsets=nn.ParameterDict({"x": nn.Parameter(torch.zeros(5))}))


@odd_model("a parameter of no dimension", zero3="is a parameter of no dimension, which ZeRO-3 of DeepSpeed cannot lay")
def scalar() -> nn.Module:
    return Of(lambda self, x: self.inner(x) * self.scale, inner=Block(), scale=nn.Parameter(torch.tensor(1.5)))


@odd_model("a parameter of no elements", zero3="is a parameter of no elements, which ZeRO-3 of DeepSpeed cannot lay")
def empty() -> nn.Module:
    return Of(lambda self, x: self.inner(x) + self.none.sum(), inner=Block(), none=nn.Parameter(torch.zeros(0, 3)))


@odd_model("fewer rows than ranks")
def few_rows() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))


@odd_model("transposed weights, and images with channels last")
def not_contiguous() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(4, 6), nn.Linear(6, 2))
    layers.to(memory_format=torch.channels_last)
    layers[2].weight = nn.Parameter(torch.randn(4, 6).mul(0.3).t())
    return Of(lambda self, x: self.layers(x.view(-1, 1, 2, 2)), layers=layers)


@odd_model(
    "a complex parameter",
    fsdp="trains ... in torch.complex64 and ... and FSDP2 reduces the gradients",
    zero="is in torch.complex64, and DeepSpeed trains in fp32, bf16 or fp16",
)
def complex_parameter() -> nn.Module:
    factor = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    return Of(lambda self, x: torch.view_as_real(self.inner(x) * self.factor), inner=Block(), factor=factor)


@odd_model("all in float64", zero="is in torch.float64, and DeepSpeed trains in fp32, bf16 or fp16")
def all_double() -> nn.Module:
    return Of(lambda self, x: self.inner(x.double()), inner=Net().double())


@odd_model(
    "one layer in float64",
    fsdp="trains ... in torch.float64, and FSDP2 reduces the gradients",
    zero="is in torch.float64, and DeepSpeed trains in fp32, bf16 or fp16",
)
def one_double() -> nn.Module:
    return Of(lambda self, x: self.head(self.inner(x).double()), inner=Block(), head=nn.Linear(4, 2).double())


@odd_model("a frozen base in bfloat16")
def frozen_half() -> nn.Module:
    base = Block().bfloat16().requires_grad_(False)
    return Of(lambda self, x: self.head(self.base(x.bfloat16()).float()), base=base, head=nn.Linear(4, 2))


@odd_model("frozen parameters of integers and booleans")
def integers() -> nn.Module:
    codes = nn.Parameter(torch.arange(-4, 4).view(2, 4), requires_grad=False)
    mask = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)
    return Of(
        lambda self, x: self.inner(x) @ self.codes.t().float() * self.mask[:2], inner=Block(), codes=codes, mask=mask
    )


@odd_model("a parameter of a class of its own, with attributes")
def own_class() -> nn.Module:
    class Marked(nn.Parameter):
        pass

    model = Net()
    model.head.weight = Marked(model.head.weight.detach())
    model.head.weight.no_decay = True
    return model


@odd("groups of an optimizer built after prepare, by attributes of parameters", zero="was prepared after its model")
def attributes(loop: Loop) -> None:
    model = Net()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.bias.rate = 0.05
    model = loop.prepare(model)
    groups: dict[float, list[Any]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "rate", 0.1), []).append(parameter)
    optimizer = torch.optim.SGD([{"params": own, "lr": rate} for rate, own in groups.items()])
    loop.noted.append(len(groups))
    optimizer = loop.prepare(optimizer)
    for step in range(STEPS):
        loop.update(square(model(loop.rows(step))), optimizer)
    loop.keep(model)


@odd_model("an embedding with sparse gradients", gathers=SPARSE)
def sparse() -> nn.Module:
    embedding = nn.Embedding(9, 4, sparse=True)
    return Of(
        lambda self, x: self.inner(self.embedding((x * 3).long().clamp(-4, 4) + 4)), embedding=embedding, inner=Block()
    )


@odd("the same with SGD without momentum", gathers=SPARSE)
def sparse_sgd(loop: Loop) -> None:
    model = sparse()
    train(loop, model, torch.optim.SGD(model.parameters(), lr=0.1))


@odd_model("an LSTM, whose weights are in a list of its own")
def lstm() -> nn.Module:
    return Of(
        lambda self, x: self.head(self.inner(x.view(-1, 2, 2))[0][:, -1]),
        inner=nn.LSTM(2, 4, num_layers=2, batch_first=True, bidirectional=True),
        head=nn.Linear(8, 2),
    )


@odd_model("attention of torch, which reads its projections' weights")
def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(2, 1, 8, dropout=0.0, batch_first=True)
    return Of(lambda self, x: self.head(self.layer(x.view(-1, 2, 2)).flatten(1)), layer=layer, head=nn.Linear(4, 2))


@odd_model("weight_norm and spectral_norm")
def parametrized() -> nn.Module:
    first, second = parametrizations.weight_norm(nn.Linear(4, 6)), parametrizations.spectral_norm(nn.Linear(6, 4))
    return nn.Sequential(first, nn.Tanh(), second, nn.Linear(4, 2))


@odd_model("lazy modules, of no shape before the first forward", several="have no shape before the first forward")
def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(2))


@odd("lazy modules after a dry run")
def lazy_run(loop: Loop) -> None:
    model = lazy()
    model(torch.zeros(2, 4))
    train(loop, model)


@odd_model("a frozen parameter made in the first forward", zero3="'Parameter' object has no attribute 'ds_id'")
def made_late() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not hasattr(self, "offset"):
            self.offset = nn.Parameter(torch.ones(4), requires_grad=False)
        return self.inner(x) + self.offset

    return Of(forward, inner=Block())


@odd("a module without parameters, prepared")
def no_parameters(loop: Loop) -> None:
    measure = loop.prepare(nn.MSELoss())
    train(loop, Net(), loss_of=lambda output: measure(output, torch.ones_like(output)))


@odd_model("adapters by hand on a frozen base (LoRA)")
def lora() -> nn.Module:
    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.first, block.second = Lora(block.first), Lora(block.second)
    return model


# --- buffers and states -----------------------------------------------------------------------------------------------


@odd_model("a counter, a mean that moves, and a buffer that is no part of the state")
def buffers() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        self.moving = 0.9 * self.moving + 0.1 * self.count  # assigned anew
        return self.inner(x) * self.scale * self.moving

    model = Of(forward, inner=Net())
    model.register_buffer("count", torch.tensor(0))
    model.register_buffer("moving", torch.ones(1))
    model.register_buffer("scale", torch.full((1,), 0.5), persistent=False)
    return model


@odd("batch norm in training: statistics of a rank's rows, and rank 0's are kept")
def batch_norm(loop: Loop) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    model, optimizer = loop.prepare(model, sgd(model))
    for step in range(STEPS):
        loop.update(loop.parts(model, square, loop.rows(step)), optimizer)
    model.eval()
    with torch.no_grad():
        loop.note(square(model(loop.rows(9))))
    loop.keep(model)


@odd_model("batch norm with statistics that are fixed")
def fixed_norm() -> nn.Module:
    norm = nn.BatchNorm1d(4).eval()
    norm.train = lambda mode=True: norm
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 2))


@odd_model("a state of its own (get_extra_state)")
def extra_state() -> nn.Module:
    class Counting(Net):
        number = 0

        def get_extra_state(self) -> Tensor:
            return torch.tensor([self.number])

        def set_extra_state(self, state: Tensor) -> None:
            self.number = int(state[0])

        def forward(self, x: Tensor) -> Tensor:
            self.number += 1
            return super().forward(x)

    return Counting()


@odd_model("hooks that rename what state_dict returns")
def renamed() -> nn.Module:
    def rename(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        for name in list(state):
            state[f"old.{name}"] = state.pop(name)

    model = Net()
    model._register_state_dict_hook(rename)
    return model


# --- structure --------------------------------------------------------------------------------------------------------


@odd_model("children named module and model")
def confusing_names() -> nn.Module:
    return Of(lambda self, x: self.model(self.module(x)), module=Block(), model=Net())


@odd_model("a __getattr__ that looks into an inner model")
def delegating() -> nn.Module:
    class Delegating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    return Delegating()


@odd_model("a ModuleDict that is the model")
def module_dict() -> nn.Module:
    class Parts(nn.ModuleDict):
        def forward(self, x: Tensor) -> Tensor:
            return self["head"](self["body"](x))

    return Parts({"body": Block(), "head": nn.Linear(4, 2)})


@odd_model("a forward of the object, and not of its class")
def own_forward() -> nn.Module:
    model = Net()
    inner = model.forward
    model.forward = lambda x: inner(x) * 2
    return model


@odd_model("forward hooks that change inputs and outputs")
def forward_hooks() -> nn.Module:
    model = Net()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.blocks[0].register_forward_hook(lambda module, args, output: output + 1)
    model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    return model


@odd_model("backward hooks that change gradients")
def backward_hooks() -> nn.Module:
    model = Net()
    model.blocks[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return model


@odd_model("hooks of parameters that change gradients", fsdp=HOOKS)
def parameter_hooks() -> nn.Module:
    model = Net()
    model.blocks[0].first.weight.register_hook(lambda gradient: gradient * 0.5)
    return model


@odd_model("hooks of parameters that see accumulated gradients", fsdp=HOOKS)
def accumulated_hooks() -> nn.Module:
    model = Net()

    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model.head.bias.register_post_accumulate_grad_hook(scale)
    return model


@odd_model("a custom autograd function")
def custom_function() -> nn.Module:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 0.5

    return Of(lambda self, x: self.head(Straight.apply(self.inner(x))), inner=Block(), head=nn.Linear(4, 2))


def _checkpointed(reentrant: bool) -> nn.Module:
    class Checkpointed(Net):
        def body(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    return Checkpointed()


@odd_model("checkpointed blocks")
def checkpointed() -> nn.Module:
    return _checkpointed(False)


@odd("reentrant checkpoints")
def checkpointed_reentrant(loop: Loop) -> None:
    model, optimizer = loop.prepare(*(lambda m: (m, sgd(m)))(_checkpointed(True)))
    for step in range(STEPS):
        loop.update(square(model(loop.rows(step).requires_grad_())), optimizer)
    loop.keep(model)


@odd_model("a compiled block")
def compiled_block() -> nn.Module:
    model = Net()
    model.blocks[0].compile(backend="eager")
    return model


@odd_model("a block in a wrapper of torch.compile", zero3=COMPILED)
def wrapped_block() -> nn.Module:
    return Of(
        lambda self, x: self.head(self.inner(x)), inner=torch.compile(Block(), backend="eager"), head=nn.Linear(4, 2)
    )


@odd_model("a model in a wrapper of torch.compile", zero3=COMPILED)
def wrapped_model() -> nn.Module:
    return torch.compile(Net(), backend="eager")


@odd("torch.compile of a prepared model")
def compiled_after(loop: Loop) -> None:
    model, optimizer = loop.prepare(*(lambda m: (m, sgd(m)))(Net()))
    compiled = torch.compile(model, backend="eager")
    for step in range(STEPS):
        loop.update(square(compiled(loop.rows(step))), optimizer)
    loop.keep(model)


# --- what a forward takes and returns ---------------------------------------------------------------------------------


@odd("an output of no dimension")
def scalar_output(loop: Loop) -> None:
    train(loop, Of(lambda self, x: square(self.inner(x)), inner=Net()), loss_of=lambda loss: loss)


def _returning(
    title: str, name: str, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor], **refused: str
) -> None:
    def run(loop: Loop) -> None:
        train(
            loop, Of(lambda self, x: wrap(self.inner(x)), inner=Block()), loss_of=lambda output: square(unwrap(output))
        )

    run.__name__ = name
    odd(title, **refused)(run)


class Named(NamedTuple):
    """An output."""

    hidden: Any
    value: Any


@dataclass
class Data:
    """An output."""

    value: Any
    nothing: None = None


class Plain:
    """An output that nobody knows how to look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


_returning(
    "an output of tuples, lists, dicts and None", "nested", lambda y: (None, {"a": [y, 3]}), lambda out: out[1]["a"][0]
)
_returning("a namedtuple", "named_tuple", lambda y: Named(None, y), lambda out: out.value)
_returning("a dataclass", "data_class", lambda y: Data(y), lambda out: out.value)
_returning(
    "an object of a class of its own", "own_output", lambda y: Plain(y), lambda out: out.value,
    fsdp="returns a Plain, in which FSDP2 finds no tensors",
)  # fmt: skip


@odd("a forward of keywords only, with defaults and others")
def keywords(loop: Loop) -> None:
    class Keywords(Net):
        def forward(self, *, x: Tensor, scale: float = 1.0, labels: Any = None, **others: Any) -> Any:
            return {"loss": square(super().forward(x) * scale), "labels": labels, **others}

    model = Keywords()
    model, optimizer = loop.prepare(model, sgd(model))
    for step in range(STEPS):
        loop.update(model(x=loop.rows(step), scale=0.5, other="text")["loss"], optimizer)
    loop.keep(model)


@odd("inputs in dicts and lists that require gradients")
def nested_inputs(loop: Loop) -> None:
    model = Of(lambda self, given: self.inner(given["rows"][0] + given["offset"]), inner=Net())
    model, optimizer = loop.prepare(model, sgd(model))
    for step in range(STEPS):
        offset = torch.ones(1, requires_grad=True)
        loop.update(square(model({"rows": [loop.rows(step)], "offset": offset, "name": "x"})), optimizer)
        loop.note(offset.grad)
    loop.keep(model)


@odd("copies made before prepare: the copy is prepared, too")
def copied_before(loop: Loop) -> None:
    model = Net()
    again = copy.deepcopy(model)
    train(loop, model)
    first = dict(loop.weights)
    train(loop, again, steps=range(2))
    loop.weights = {**loop.weights, **{f"first.{name}": value for name, value in first.items()}}
