"""Odd loops over an ordinary model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.odd.loop import STEPS, Loop, odd
from tests.odd.models import UNUSED, Block, Net, Of, sgd, square, train

PAST = "DDP averages no gradients of a call that goes past it"
MIXED = "got mixed torch.Tensor and DTensor"
APART = "this backward met parameters that ZeRO-3 has taken apart again"
CHANGED = "was changed in place since the last step, and ZeRO-3 trains shards that such a change does not reach"
FAILED = "cannot go on behind one: its gradients would be mixed with the next ones"
SHARED = "and each would exchange gradients of them by itself"


def start(loop: Loop, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    """Prepare an ordinary model and its optimizer."""
    model = model or Net()
    return loop.prepare(model, sgd(model, **options))


# --- losses and backwards ---------------------------------------------------------------------------------------------


@odd("two losses, added")
def two_losses(loop: Loop) -> None:
    train(loop, Net(), loss_of=lambda output: square(output) + 0.5 * (output - 1).abs().mean())


def _two_backwards(loop: Loop, retain: bool) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):
        output = model(loop.rows(step))
        loop.backward(square(output), retain_graph=True)
        again = output if retain else model(loop.rows(step + 7))
        loop.update((again - 1).abs().mean(), optimizer)
    loop.keep(model)


@odd("two backwards of one forward", ddp="called a second time after one forward", zero3=APART)
def backwards_of_one(loop: Loop) -> None:
    _two_backwards(loop, retain=True)


@odd("two forwards, each with its backward, before a step")
def forwards_and_backwards(loop: Loop) -> None:
    _two_backwards(loop, retain=False)


@odd("two forwards before one backward")
def siamese(loop: Loop) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):
        loop.update((model(loop.rows(step)) - model(loop.rows(step + 7))).square().mean() + 0.1, optimizer)
    loop.keep(model)


@odd("a forward with gradients that no backward follows")
def forward_alone(loop: Loop) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):
        loop.note(square(model(loop.rows(step + 7))))
        loop.update(square(model(loop.rows(step))), optimizer)
    loop.keep(model)


@odd("a step without a backward")
def step_alone(loop: Loop) -> None:
    model, optimizer = start(loop)
    optimizer.step()
    for step in range(STEPS):
        loop.update(square(model(loop.rows(step))), optimizer)
    optimizer.zero_grad()
    optimizer.step()
    loop.keep(model)


@odd("gradients kept as zeros (set_to_none=False)")
def zeroed(loop: Loop) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):
        loop.backward(square(model(loop.rows(step))))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    loop.keep(model)


@odd("gradients dropped by the model")
def zeroed_by_model(loop: Loop) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):
        model.zero_grad()
        loop.backward(square(model(loop.rows(step))))
        optimizer.step()
    loop.keep(model)


_DOUBLE = "with create_graph=True, for a gradient penalty"


@odd("a gradient penalty (create_graph)", gathers=_DOUBLE)
def penalty(loop: Loop) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):
        rows = loop.rows(step).requires_grad_()
        output = model(rows)
        (gradient,) = torch.autograd.grad(output.sum(), rows, create_graph=True)
        loop.update(square(output) + (gradient.norm(dim=1) - 1).square().mean(), optimizer)
    loop.keep(model)


FOREIGN = "was not begun by accelerator.backward(loss)"


@odd("loss.backward() in the place of accelerator.backward(loss)", zero=FOREIGN)
def own_backward(loop: Loop) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):
        square(model(loop.rows(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    loop.keep(model)


@odd("gradients of the input alone (an adversarial step)", zero1=FOREIGN, zero2=FOREIGN)
def adversarial(loop: Loop) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):
        rows = loop.rows(step).requires_grad_()
        (gradient,) = torch.autograd.grad(model(rows).sum(), rows)
        loop.update(square(model(rows.detach() + 0.1 * gradient)), optimizer)
    loop.keep(model)


@odd("weights in the loss (L2 by hand)", fsdp=MIXED, zero3=APART)
def decay_by_hand(loop: Loop) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        loop.update(square(model(loop.rows(step))) + 0.01 * penalty, optimizer)
    loop.keep(model)


@odd("gradients scaled by hand", zero="'NoneType' object has no attribute 'mul_'")
def scaled_by_hand(loop: Loop) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):
        loop.backward(square(model(loop.rows(step))))
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    loop.keep(model)


@odd("weights clamped in place between steps (WGAN)", zero3=CHANGED)
def clamped(loop: Loop) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):
        loop.update(square(model(loop.rows(step))), optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
    loop.keep(model)


@odd("weights loaded with load_state_dict between steps", zero3=CHANGED)
def loaded_between(loop: Loop) -> None:
    model, optimizer = start(loop)
    loop.update(square(model(loop.rows(0))), optimizer)
    torch.manual_seed(9)
    loop.bare(model).load_state_dict(Net().state_dict())
    loop.update(square(model(loop.rows(1))), optimizer)
    loop.keep(model)


@odd("activations kept on the host (save_on_cpu)")
def saved_on_host(loop: Loop) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):
        with torch.autograd.graph.save_on_cpu():
            loss = square(model(loop.rows(step)))
        loop.update(loss, optimizer)
    loop.keep(model)


@odd("hidden states that go on between steps, detached (TBPTT)")
def truncated(loop: Loop) -> None:
    model = Of(lambda self, x: self.inner(x[:, :4] + x[:, 4:]), inner=Block())
    model, optimizer = start(loop, model)
    hidden = torch.zeros_like(loop.rows(0))
    for step in range(STEPS):
        hidden = model(torch.cat([loop.rows(step), hidden.detach()], 1))
        loop.update(square(hidden), optimizer)
    loop.keep(model)


# --- windows, clipping, schedules -------------------------------------------------------------------------------------


@odd("windows of three and a last one of two")
def uneven_windows(loop: Loop) -> None:
    model, optimizer = start(loop)
    for begin, end in ((0, 3), (3, 6), (6, 8)):
        losses = [lambda step=step: square(model(loop.rows(step))) for step in range(begin, end)]
        loop.window(model, optimizer, losses)
    loop.keep(model)


def _clipped(loop: Loop, clip: str, bound: float) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):
        loop.backward(square(model(loop.rows(step))))
        getattr(loop, clip)(model, bound)
        optimizer.step()
        optimizer.zero_grad()
    loop.keep(model)


@odd("gradients clipped by their norm")
def clipped_norm(loop: Loop) -> None:
    _clipped(loop, "clip_norm", 0.3)


@odd("gradients clipped by value")
def clipped_value(loop: Loop) -> None:
    _clipped(loop, "clip_value", 0.02)


@odd("a schedule by a closure, chained to another")
def scheduled(loop: Loop) -> None:
    model = Net()
    optimizer = sgd(model)
    from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, SequentialLR

    factor = 0.5
    parts = [LambdaLR(optimizer, lambda step: factor ** (step + 1)), ExponentialLR(optimizer, 0.9)]
    model, optimizer, schedule = loop.prepare(model, optimizer, SequentialLR(optimizer, parts, milestones=[2]))
    for step in range(5):
        loop.update(square(model(loop.rows(step))), optimizer)
        schedule.step()
        loop.noted.append(schedule.get_last_lr()[0])
    loop.keep(model)


@odd("a rate that falls where the loss does not (ReduceLROnPlateau)")
def plateau(loop: Loop) -> None:
    model = Net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    model, optimizer, schedule = loop.prepare(model, optimizer, schedule)
    for step in range(STEPS):
        loop.update(square(model(loop.rows(step))), optimizer)
        schedule.step(loop.noted[-1])
        loop.noted.append(optimizer.param_groups[0]["lr"])
    loop.keep(model)


@odd("several groups of parameters, with a rate set by hand")
def groups(loop: Loop) -> None:
    model = Net()
    bodies = {"params": list(model.blocks.parameters()), "lr": 0.05, "weight_decay": 0.1}
    optimizer = torch.optim.SGD([bodies, {"params": list(model.head.parameters())}], lr=0.2)
    model, optimizer = loop.prepare(model, optimizer)
    for step in range(STEPS):
        loop.update(square(model(loop.rows(step))), optimizer)
        optimizer.param_groups[1]["lr"] *= 0.5
    loop.keep(model)


@odd("a group that is added later", zero="SGD is in an engine")
def added_group(loop: Loop) -> None:
    model = Net()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.blocks.parameters(), lr=0.1))
    for step in range(STEPS):
        loop.update(square(model(loop.rows(step))), optimizer)
        if step == 0:
            optimizer.add_param_group({"params": list(loop.bare(model).head.parameters()), "lr": 0.3})
    loop.keep(model)


@odd("a step with a closure", zero="cannot be combined with DeepSpeed")
def closure(loop: Loop) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):

        def take(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = square(model(loop.rows(step)))
            loop.backward(loss)
            return loss

        optimizer.step(take)
    loop.keep(model)


@odd("LBFGS", fsdp="its directions come of products over all parameters", zero="LBFGS")
def lbfgs(loop: Loop) -> None:
    model = Net()
    model, optimizer = loop.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    for step in range(2):

        def take(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = square(model(loop.rows(step)))
            loop.backward(loss)
            return loop.mean(loss)

        optimizer.step(take)
    loop.keep(model)


# --- what is prepared, and when ---------------------------------------------------------------------------------------


@odd("an optimizer built after prepare", zero="was prepared after its model")
def built_after(loop: Loop) -> None:
    model = loop.prepare(Net())
    optimizer = loop.prepare(sgd(model))
    for step in range(STEPS):
        loop.update(square(model(loop.rows(step))), optimizer)
    loop.keep(model)


@odd("an optimizer built after prepare that is never prepared", zero="so that it can only be evaluated")
def never_prepared(loop: Loop) -> None:
    model = loop.prepare(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        loop.update(square(model(loop.rows(step))), optimizer)
    loop.keep(model)


@odd("two optimizers over one model", zero="this strategy's engine takes one for each model")
def two_optimizers(loop: Loop) -> None:
    model = Net()
    optimizers = [torch.optim.SGD(model.blocks.parameters(), lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.3)]
    model, *optimizers = loop.prepare(model, *optimizers)
    for step in range(STEPS):
        loop.update(square(model(loop.rows(step))), *optimizers)
    loop.keep(model)


@odd("two models with one optimizer", zero="this strategy's engine takes one optimizer for each model")
def one_optimizer(loop: Loop) -> None:
    first, second = Net(), Net()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    first, second, optimizer = loop.prepare(first, second, optimizer)
    for step in range(STEPS):
        rows = loop.rows(step)
        loop.update(square(first(rows) - second(rows)) + square(second(rows)), optimizer)
    loop.keep(first, second)


@odd("a GAN: two models with two optimizers that train against each other")
def gan(loop: Loop) -> None:
    maker, judge = nn.Sequential(Block(), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    for model in (maker, judge):
        model._tp_plan = (
            {"0.first": "colwise", "0.second": "rowwise"} if model is maker else {"0": "colwise", "2": "rowwise"}
        )
    maker, judge, *optimizers = loop.prepare(maker, judge, sgd(maker, lr=0.05), sgd(judge, lr=0.05))
    for step in range(STEPS):
        rows = loop.rows(step)
        made = maker(rows.flip(1)).detach()
        loop.update(square(judge(rows) - 1) + square(judge(made)), optimizers[1])
        loop.bare(judge).requires_grad_(False)
        loop.update(square(judge(maker(rows.flip(1))) - 1), optimizers[0])
        loop.bare(judge).requires_grad_(True)
    loop.keep(maker, judge)


@odd("a GAN whose judge is not frozen meanwhile", zero="an engine takes part in the backward of its own model alone")
def careless_gan(loop: Loop) -> None:
    maker, judge = Net(), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    judge._tp_plan = {"0": "colwise", "2": "rowwise"}
    maker, judge, *optimizers = loop.prepare(maker, judge, sgd(maker, lr=0.05), sgd(judge, lr=0.05))
    for step in range(STEPS):
        rows = loop.rows(step)
        loop.update(square(judge(rows[:, :2]) - 1) + square(judge(maker(rows).detach())), optimizers[1])
        loop.update(square(judge(maker(rows)) - 1), optimizers[0])
        optimizers[1].zero_grad()
    loop.keep(maker, judge)


@odd("two models that share a trunk", zero="this strategy's engine takes one optimizer for each model", several=SHARED)
def shared_trunk(loop: Loop) -> None:
    trunk = Block()
    actor = Of(lambda self, x: self.head(self.trunk(x)), trunk=trunk, head=nn.Linear(4, 2))
    critic = Of(lambda self, x: self.head(self.trunk(x)), trunk=trunk, head=nn.Linear(4, 1))
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.head.parameters()], lr=0.1)
    actor, critic, optimizer = loop.prepare(actor, critic, optimizer)
    for step in range(STEPS):
        loop.update(square(actor(loop.rows(step))) + square(critic(loop.rows(step))), optimizer)
    loop.keep(actor, critic)


@odd("a prepared model inside another that is prepared", several=SHARED)
def inner_prepared(loop: Loop) -> None:
    inner = loop.prepare(Block())
    train(loop, Of(lambda self, x: self.head(self.inner(x)), inner=inner, head=nn.Linear(4, 2)))


@odd("one model prepared twice")
def prepared_twice(loop: Loop) -> None:
    model, optimizer = loop.prepare(*start(loop))
    for step in range(STEPS):
        loop.update(square(model(loop.rows(step))), optimizer)
    loop.keep(model)


@odd("copy.deepcopy of the prepared model", shards="is sharded, and its shards cannot be copied or pickled")
def copied_after(loop: Loop) -> None:
    model, optimizer = start(loop)
    loop.update(square(model(loop.rows(0))), optimizer)
    copied = copy.deepcopy(loop.bare(model))
    loop.update(square(model(loop.rows(1))), optimizer)
    loop.note(square(copied(loop.rows(2))))
    loop.keep(model)


@odd("an EMA of weights in AveragedModel", shards="is sharded, and its shards cannot be copied or pickled")
def ema(loop: Loop) -> None:
    model, optimizer = start(loop)
    mean = AveragedModel(loop.bare(model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(STEPS):
        loop.update(square(model(loop.rows(step))), optimizer)
        mean.update_parameters(loop.bare(model))
    loop.note(square(mean(loop.rows(9))))
    loop.keep(model)


@odd("an EMA by hand into a copy made before prepare (a target network)", fsdp=MIXED)
def target(loop: Loop) -> None:
    model = Net()
    slow = copy.deepcopy(model).requires_grad_(False)
    model, optimizer = start(loop, model)
    for step in range(STEPS):
        with torch.no_grad():
            wanted = slow(loop.rows(step)) + 1
        loop.update(square(model(loop.rows(step)) - wanted), optimizer)
        with torch.no_grad():
            for own, trained in zip(slow.parameters(), model.parameters(), strict=True):
                own.lerp_(trained, 0.5)
    loop.keep(model)


@odd("a frozen teacher that is not prepared")
def teacher(loop: Loop) -> None:
    torch.manual_seed(5)
    frozen = Net().eval().requires_grad_(False)
    model, optimizer = start(loop)
    for step in range(STEPS):
        with torch.no_grad():
            wanted = frozen(loop.rows(step))
        loop.update(square(model(loop.rows(step)) - wanted), optimizer)
    loop.keep(model)


@odd("a frozen teacher that is prepared")
def prepared_teacher(loop: Loop) -> None:
    torch.manual_seed(5)
    frozen = loop.prepare(Net().eval().requires_grad_(False))
    torch.manual_seed(0)
    model, optimizer = start(loop)
    for step in range(STEPS):
        with torch.no_grad():
            wanted = frozen(loop.rows(step))
        loop.update(square(model(loop.rows(step)) - wanted), optimizer)
    loop.keep(model, frozen)


# --- what becomes of the model within a run ---------------------------------------------------------------------------


@odd("another method than forward", ddp=PAST)
def other_method(loop: Loop) -> None:
    model, optimizer = start(loop)
    for step in range(STEPS):
        loop.update(square(loop.bare(model).body(loop.rows(step))), optimizer)
    loop.keep(model)


@odd("the user's own model called, and not what prepare returned", ddp=PAST)
def bare_called(loop: Loop) -> None:
    own = Net()
    model, optimizer = start(loop, own)
    for step in range(STEPS):
        loop.update(square(own(loop.rows(step))), optimizer)
    loop.keep(model)


@odd("train and eval within a step")
def switched(loop: Loop) -> None:
    model = Of(lambda self, x: self.inner(x) * (1 if self.training else 3), inner=Net())
    model, optimizer = start(loop, model)
    for step in range(STEPS):
        model.eval()
        with torch.no_grad():
            wanted = model(loop.rows(step))
        model.train()
        loop.update(square(model(loop.rows(step)) - wanted), optimizer)
    loop.keep(model)


@odd("gradients in eval mode")
def trained_in_eval(loop: Loop) -> None:
    model, optimizer = start(loop)
    model.eval()
    for step in range(STEPS):
        loop.update(square(model(loop.rows(step))), optimizer)
    loop.keep(model)


@odd(
    "parameters frozen after some steps", ddp=UNUSED, zero="was trained when the model was prepared, and is frozen now"
)
def frozen_later(loop: Loop) -> None:
    model, optimizer = start(loop)
    for step in range(4):
        loop.bare(model).blocks[0].requires_grad_(step < 2)
        loop.update(square(model(loop.rows(step))), optimizer)
    loop.keep(model)


@odd(
    "parameters that were frozen at prepare, trained later",
    ddp="was frozen when the model was prepared, and is trained now",
    zero="was frozen when the model was prepared, and is trained now",
)
def unfrozen(loop: Loop) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.blocks[0].requires_grad_(False)
    model, optimizer = loop.prepare(model, optimizer)
    for step in range(4):
        loop.bare(model).blocks[0].requires_grad_(step > 1)
        loop.update(square(model(loop.rows(step))), optimizer)
    loop.keep(model)


@odd("a layer replaced after prepare", ddp=UNUSED, zero3="'Parameter' object has no attribute 'ds_active_sub_modules'")
def replaced(loop: Loop) -> None:
    model, optimizer = start(loop)
    loop.update(square(model(loop.rows(0))), optimizer)
    torch.manual_seed(9)
    loop.bare(model).head = nn.Linear(4, 2)
    for step in range(1, STEPS):
        loop.update(square(model(loop.rows(step))), optimizer)
    loop.keep(model)


@odd("a layer without parameters replaced after prepare")
def activation_replaced(loop: Loop) -> None:
    model = Of(lambda self, x: self.head(self.act(self.inner(x))), inner=Block(), act=nn.Tanh(), head=nn.Linear(4, 2))
    model, optimizer = start(loop, model)
    loop.update(square(model(loop.rows(0))), optimizer)
    loop.bare(model).act = nn.Sigmoid()
    for step in range(1, STEPS):
        loop.update(square(model(loop.rows(step))), optimizer)
    loop.keep(model)


@odd("hooks put on a block after prepare")
def hooked_later(loop: Loop) -> None:
    model, optimizer = start(loop)
    seen: list[float] = []
    handle = loop.bare(model).blocks[0].register_forward_hook(lambda module, args, output: output * 2)
    for step in range(STEPS):
        loop.update(square(model(loop.rows(step))), optimizer)
        if step == 1:
            handle.remove()
    loop.keep(model)
    loop.noted += seen


@odd("an error in a forward that all ranks catch, and go on with the next rows")
def caught(loop: Loop) -> None:
    class Failing(Net):
        def forward(self, x: Tensor) -> Any:
            y = self.body(x)
            if x.shape[-1] == 4 and self.fails:
                raise ArithmeticError("these rows are no good")
            return self.head(y)

    model = Failing()
    own = model
    model, optimizer = start(loop, model)
    for step in range(5):
        own.fails = step in (1, 2)
        try:
            loss = square(model(loop.rows(step)))
        except ArithmeticError as error:
            loop.noted.append(str(error))
            continue
        loop.update(loss, optimizer)
    loop.keep(model)


@odd("an error in a backward that all ranks catch, and go on with the next rows", fsdp=FAILED, zero=FAILED)
def caught_backward(loop: Loop) -> None:
    class Fails(torch.autograd.Function):
        is_due = False

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if Fails.is_due:
                raise ArithmeticError("no gradient")
            return gradient

    model = Of(lambda self, x: self.head(Fails.apply(self.inner(x))), inner=Block(), head=nn.Linear(4, 2))
    model, optimizer = start(loop, model)
    for step in range(4):
        Fails.is_due = step == 1
        loss = square(model(loop.rows(step)))
        try:
            loop.backward(loss)
        except ArithmeticError as error:
            loop.noted.append(str(error))
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    loop.keep(model)
