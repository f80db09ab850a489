"""Fine-tune a BERT-shaped classifier with the Trainer.

Without options: which package of Python's standard library does a snippet of source code come from? Text, tokenizer and
model are made on the spot, so nothing is downloaded. With a hub at hand, the same job on a model and a dataset of your
choice:

    python examples/finetune_classifier.py
    accel-trainer launch --config_file full_shard --cpu --num_processes 2 examples/finetune_classifier.py
    accel-trainer launch --cpu --num_processes 2 examples/finetune_classifier.py --deepspeed zero3
    python examples/finetune_classifier.py --model bert-base-cased --dataset nyu-mll/glue --config mrpc
"""

from __future__ import annotations

import argparse

import datasets
import evaluate
from classification import (
    METRIC,
    add_data_options,
    build_model,
    check_saved,
    describe_data,
    describe_result,
    largest_class,
    load_texts,
    tokenize,
)
from options import add_model_options, add_run_options, add_trainer_options, build_arguments
from report import count_parameters, describe_layout, print_table
from transformers import DataCollatorWithPadding, EvalPrediction
from transformers.utils import logging as transformers_logging

from accel_trainer import Trainer


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_options(parser)
    add_run_options(parser, output_dir="outputs/classifier", epochs=3, batch_size=32)
    add_trainer_options(parser)
    add_model_options(parser, vocab_size=2048, max_length=96)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = parse_options(argv)
    arguments = build_arguments(options)
    is_main = arguments.process_index == 0
    if not is_main:
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()

    with arguments.main_process_first(desc="preparing the data"):
        texts = load_texts(options)
    # Outside: under ZeRO-3 the ranks build a model together, each a part of every parameter.
    tokenizer, model = build_model(options, texts["train"])
    with arguments.main_process_first(desc="tokenizing the data"):
        tokens = tokenize(texts, tokenizer)
    num_parameters = count_parameters(model)
    accuracy = evaluate.load(METRIC, keep_in_memory=True)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        return accuracy.compute(predictions=prediction.predictions.argmax(-1), references=prediction.label_ids)

    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=tokens["train"],
        eval_dataset=tokens["eval"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
    )
    trained = trainer.train()
    trainer.save_model(options.output_dir)
    final = trainer.predict(tokens["eval"], metric_key_prefix="eval")

    baseline = largest_class(texts["eval"]["label"])
    metrics = {**trained.metrics, **final.metrics, "majority_accuracy": baseline}
    layout = describe_layout(trainer.accelerator, trainer.model, num_parameters)
    if is_main:
        with arguments.whole_models():  # this rank alone looks at it
            same = check_saved(options.output_dir, texts["eval"], final.predictions.argmax(-1))
        rows = [
            *layout,
            ("samples", describe_data(texts)),
            ("training", f"{trainer.state.global_step} updates, {metrics['train_steps_per_second']:.2f} steps/s"),
            *describe_result(metrics),
            ("saved to", options.output_dir),
            ("from_pretrained", same),
        ]
        print_table("Fine-tuned classifier", rows)
    trainer.accelerator.end_training()
    return metrics


if __name__ == "__main__":
    main()
