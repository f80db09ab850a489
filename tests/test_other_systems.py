"""A run on one process where the interpreter has neither `fcntl` nor `resource`, and the system no `/proc`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cells import beyond

ROOT = Path(__file__).parents[1]
# Everything of this project and of torch is imported after these lines. An audit hook sees all ways to open a file.
# psutil, which transformers imports where it is, has code of its own for each system; that for Linux needs `resource`.
HIDDEN = """
import json, os, sys
from contextlib import suppress
with suppress(ImportError):
    import psutil
sys.modules.update(fcntl=None, resource=None)
del os.sched_getaffinity, os.sched_setaffinity, os.sysconf
def hide(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith("/proc/"):
        raise FileNotFoundError(2, "hidden", arguments[0])
sys.addaudithook(hide)
"""
LOOP = """
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader
from accel_trainer import Accelerator

def train(folder, stop):
    torch.manual_seed(0)
    rows = [(torch.full((4,), i / 8), torch.full((2,), i % 3 / 3)) for i in range(8)]
    accelerator = Accelerator(cpu=True, project_dir=folder)
    model = nn.Linear(4, 2)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), DataLoader(rows, 2)
    )
    losses = []
    state = Path(folder, "state")
    if state.exists():
        accelerator.load_state(state)
        loader = accelerator.skip_first_batches(loader, 2)
    for inputs, labels in loader:
        loss = ((model(inputs) - labels) ** 2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == stop:
            accelerator.save_state(state)
            break
    return losses
"""
TRAINER = """
import torch
from pathlib import Path
from torch import nn
from accel_trainer import Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
    def forward(self, x, labels):
        output = self.linear(x)
        return {"loss": ((output - labels) ** 2).mean(), "logits": output}

def train(folder, stop):
    torch.manual_seed(0)
    rows = [{"x": torch.full((4,), i / 8), "labels": torch.full((2,), i % 3 / 3)} for i in range(8)]
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=2, max_steps=4 if stop is None else stop, save_steps=2,
        logging_steps=1, lr_scheduler_type="constant", report_to="none", disable_tqdm=True,
    )
    trainer = Trainer(Model(), arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=Path(folder, "checkpoint-2").exists())
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
"""
MEMORY = """
from accel_trainer.runtime.memory import available_host_bytes, memory_in_use, peak_memory
import torch
figures = [memory_in_use(torch.device("cpu")), peak_memory(torch.device("cpu")), available_host_bytes() == sys.maxsize]
"""


@pytest.mark.parametrize("kind", [beyond(pytest.param(LOOP, id="loop")), pytest.param(TRAINER, id="Trainer")])
def test_a_run_trains_saves_and_resumes_without_fcntl_resource_and_proc(tmp_path: Path, kind: str):
    calls = "train('whole', None), train('run', 2), train('run', None), figures"
    script = f"{HIDDEN}{kind}{MEMORY}\nos.chdir(sys.argv[1])\nprint(json.dumps([{calls}]))"
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    whole, begun, resumed, figures = json.loads(done.stdout.splitlines()[-1])

    assert len(whole) == 4
    assert begun == whole[:2]
    assert resumed[-2:] == whole[2:]
    assert "this system has no flock (fcntl): a second run that saves to" in done.stderr
    assert figures == [None, None, True], "memory that nobody tells is None, and bounds nothing"
