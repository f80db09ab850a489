"""Profiling: where the time of a step goes, with one trace for each rank.

    python examples/by_feature/profiling.py --output_trace_dir outputs/traces

Open a trace in https://ui.perfetto.dev or chrome://tracing. With a schedule, `profiler.step()` ends each step.
"""

from __future__ import annotations

import torch
from digits import build_loaders, build_model, options_parser
from torch.nn import functional as F

from accel_trainer import Accelerator, ProfileKwargs, set_seed


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--output_trace_dir", help="where traces are written (default: nowhere)")
    options = parser.parse_args()

    set_seed(0)
    profile = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 3, "repeat": 1},
        record_shapes=True,
        output_trace_dir=options.output_trace_dir,
    )
    accelerator = Accelerator(cpu=options.cpu or None, kwargs_handlers=[profile])
    model = build_model()
    train, _ = build_loaders(options.batch_size)
    model, optimizer, train = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=options.learning_rate), train
    )
    with accelerator.profile() as profiler:
        for _, (pixels, labels) in zip(range(6), train, strict=False):
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(pixels), labels))
            optimizer.step()
            profiler.step()
    accelerator.print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=8))
    accelerator.end_training()


if __name__ == "__main__":
    main()
