"""Odd batches, datasets, losses and errors in a Trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from tests.odd.batches import Data, Named, Stream, rows
from tests.odd.loop import COLUMNS, Loop, odd, tell
from tests.odd.models import Net, square

Inputs = Any


class Model(Net):
    """Returns its loss, as a Trainer wants it."""

    def forward(self, x: Tensor, **others: Any) -> Any:
        output = super().forward(x)
        return {"loss": square(output), "logits": output}


def collate(samples: list[Tensor]) -> Inputs:
    return {"x": torch.stack(samples), "labels": torch.zeros(len(samples))}


def fit(
    loop: Loop,
    data: Any,
    make: Callable[[list[Any]], Inputs] = collate,
    model: nn.Module | None = None,
    loss_of: Callable[[Any, Inputs], Tensor] | None = None,
    evaluation: Any = None,
    **arguments: Any,
) -> None:
    """Train an epoch of steps of 4 rows with SGD, in the order of the data; keep the weights.

    Args:
        loss_of: of a model and inputs; without it the model's own.
        evaluation: rows; what is predicted for them is noted.
    """
    model = model or Model()
    if loop.name == "plain":
        _fit_plain(loop, data, make, model, loss_of or (lambda model, inputs: model(**inputs)["loss"]), arguments)
        trained = model
    else:
        trained = _fit_trainer(loop, data, make, model, loss_of, evaluation, arguments)
    if evaluation is not None and loop.name == "plain":
        with torch.no_grad():
            loop.noted.append(model.eval()(**make(list(evaluation)))["logits"].tolist())
    if trained is not None:
        loop.keep(trained)


def _fit_plain(loop: Loop, data: Any, make: Any, model: Any, loss_of: Any, arguments: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = list(torch.utils.data.DataLoader(data, batch_size=4, collate_fn=make))
    size = arguments.get("gradient_accumulation_steps", 1)
    for begin in range(0, len(steps), size):
        window = steps[begin : begin + size]
        for inputs in window:
            (loss_of(model, inputs) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _fit_trainer(
    loop: Any, data: Any, make: Any, model: Any, loss_of: Any, evaluation: Any, arguments: dict[str, Any]
) -> Any:
    from transformers.trainer_callback import PrinterCallback

    from accel_trainer import Trainer, TrainingArguments
    from accel_trainer.plugins.parallelism import ParallelismConfig

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **kwargs) if loss_of is None else loss_of(model, inputs)

    column = dict(COLUMNS[loop.name].trainer)
    if "parallelism_config" in column:
        column["parallelism_config"] = ParallelismConfig(**column["parallelism_config"])
    options = {
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "num_train_epochs": 1, "logging_steps": 1,
        "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
        "save_strategy": "no", "remove_unused_columns": False, "label_names": ["labels"],
        "per_device_train_batch_size": 4 // loop.world_size, "per_device_eval_batch_size": 2,
        "train_sampling_strategy": "sequential", **column, **arguments,
    }  # fmt: skip
    loop.accelerator.free_memory()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Own(model=model, args=TrainingArguments(folder, **options), train_dataset=data, data_collator=make)
        trainer.remove_callback(PrinterCallback)
        loop.accelerator = trainer.accelerator
        trainer.train()
        if evaluation is not None:
            loop.noted.append(trainer.predict(evaluation).predictions.tolist())
    return trainer.model_wrapped


# --- batches ----------------------------------------------------------------------------------------------------------


@odd("Trainer: a short last step")
def trainer_short(loop: Loop) -> None:
    fit(loop, rows(), evaluation=rows(5))


@odd("Trainer: windows with a short last one")
def trainer_windows(loop: Loop) -> None:
    fit(loop, rows(20), gradient_accumulation_steps=3)


@odd("Trainer: a dict with None, text and dicts in it")
def trainer_dict(loop: Loop) -> None:
    fit(
        loop,
        rows(),
        lambda r: {"x": torch.stack(r), "none": None, "ids": ["a"] * len(r), "more": {"y": torch.stack(r)}},
    )


@odd("Trainer: a batch that is a namedtuple")
def trainer_named(loop: Loop) -> None:
    fit(loop, rows(), lambda r: Named(torch.stack(r)), loss_of=lambda model, batch: model(batch.x)["loss"])


@odd("Trainer: a batch that is a dataclass")
def trainer_data(loop: Loop) -> None:
    fit(loop, rows(), lambda r: Data(torch.stack(r)), loss_of=lambda model, batch: model(batch.x)["loss"])


@odd("Trainer: a batch that is a list of tensors")
def trainer_list(loop: Loop) -> None:
    fit(loop, rows(), list, loss_of=lambda model, batch: model(torch.stack(list(batch)))["loss"])


@odd("Trainer: fewer samples than ranks")
def trainer_one(loop: Loop) -> None:
    fit(loop, rows(1))


@odd("Trainer: a generator's rows, and fewer of them than max_steps takes")
def trainer_stream(loop: Loop) -> None:
    fit(loop, Stream(), **({} if loop.name == "plain" else {"max_steps": 4}))


@odd("Trainer: streams of unequal length, each rank's its own")
def trainer_unequal(loop: Loop) -> None:
    class Part(IterableDataset):
        is_sharded_by_rank = True

        def __iter__(self) -> Iterator[Tensor]:
            yield from rows()[loop.rank :: loop.world_size]

    fit(loop, Part(), **({} if loop.name == "plain" else {"max_steps": 4}))


# --- models and losses ------------------------------------------------------------------------------------------------


@odd("Trainer: two losses")
def trainer_losses(loop: Loop) -> None:
    def loss_of(model: Any, inputs: Any) -> Tensor:
        found = model(**inputs)
        return found["loss"] + 0.5 * (found["logits"] - 1).abs().mean()

    fit(loop, rows(), loss_of=loss_of)


@odd("Trainer: a model that returns a tuple with the loss first")
def trainer_tuple(loop: Loop) -> None:
    class Tuple(Net):
        def forward(self, x: Tensor, **others: Any) -> Any:
            output = super().forward(x)
            return square(output), output

    fit(
        loop,
        rows(),
        model=Tuple(),
        loss_of=(lambda model, inputs: model(**inputs)[0]) if loop.name == "plain" else None,
    )


@odd("Trainer: frozen and unused parameters")
def trainer_frozen(loop: Loop) -> None:
    model = Model()
    model.blocks[0].requires_grad_(False)
    model.spare = nn.Linear(4, 4)
    fit(loop, rows(), model=model)


@odd("Trainer: weights tied across units")
def trainer_tied(loop: Loop) -> None:
    model = Model()
    model.blocks[1].first.weight = model.blocks[0].first.weight
    fit(loop, rows(), model=model)


@odd("Trainer: an LSTM")
def trainer_lstm(loop: Loop) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor, **others: Any) -> Any:
            return {"loss": square(self.head(self.inner(x.view(-1, 2, 2))[0][:, -1]))}

    fit(loop, rows(), model=Recurrent())


# --- errors in the user's code ----------------------------------------------------------------------------------------


def _fails(loop: Loop, run: Callable[[], None]) -> None:
    """Note the error of a run, which has to be the user's own, or another rank's word of it."""
    try:
        run()
    except Exception as error:
        own, printed = "ValueError: the user's own", tell(error)
        loop.noted.append(own if own in printed else printed)


def fail() -> Any:
    raise ValueError("the user's own")


class FailingRows(list):
    """Rows of which one cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        return fail() if index == 6 else super().__getitem__(index)


class FailingModel(Model):
    """Fails for one row of all."""

    def forward(self, x: Tensor, **others: Any) -> Any:
        return fail() if (x == rows()[6]).all(1).any() else super().forward(x)


def _failing_collate(samples: list[Tensor]) -> Any:
    return fail() if any(torch.equal(sample, rows()[6]) for sample in samples) else collate(samples)


def _failing_loss(model: Any, inputs: Any) -> Tensor:
    return fail() if torch.equal(inputs["x"][0], rows()[4]) else model(**inputs)["loss"]


_PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "dataset": ("a dataset", {"data": FailingRows(rows())}),
    "collate": ("a collate function", {"make": _failing_collate}),
    "model": ("a model", {"model": FailingModel}),
    "loss": ("a loss", {"loss_of": _failing_loss}),
}


def _native(loop: Loop, data: Any, make: Any = collate, model: Any = Model, loss_of: Any = None) -> None:
    trained = model()
    trained, optimizer = loop.prepare(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
    for inputs in loop.loader(data, collate_fn=make):
        loss = trained(**inputs)["loss"] if loss_of is None else loss_of(trained, inputs)
        loop.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def _failing(name: str, place: str, given: dict[str, Any], front: str) -> None:
    def run(loop: Loop) -> None:
        options = {"data": rows(), **given}
        if front == "Trainer":
            if "model" in options:
                options["model"] = options["model"]()
            _fails(loop, lambda: fit(loop, **options))
        else:
            _fails(loop, lambda: _native(loop, **options))

    run.__name__ = f"{'trainer_' if front else ''}fails_in_{name}"
    odd(f"{front}{': ' if front else ''}an error in {place}, on one rank", ends=True)(run)


for _name, (_place, _given) in _PLACES.items():
    for _front in ("", "Trainer"):
        _failing(_name, _place, _given, _front)


@odd("Trainer: an error in compute_metrics", ends=True)
def trainer_fails_in_metrics(loop: Loop) -> None:
    def run() -> None:
        if loop.name == "plain":
            fail()
        from accel_trainer import Trainer, TrainingArguments

        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                folder, use_cpu=True, report_to="none", remove_unused_columns=False, label_names=["labels"]
            )
            Trainer(
                model=Model(), args=args, eval_dataset=rows(), data_collator=collate, compute_metrics=lambda _: fail()
            ).evaluate()

    _fails(loop, run)
