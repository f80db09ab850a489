r"""Fine-tune an image classifier: a vision transformer on scikit-learn's digits, or on a folder of images.

    python examples/vision.py
    accel-trainer launch --cpu --num_processes 2 --config_file full_shard examples/vision.py
    accel-trainer launch --num_processes 8 --mixed_precision bf16 examples/vision.py \
        --model google/vit-base-patch16-224-in21k --images folder/of/classes --num_epochs 3

`--images` has a folder of pictures for each class (this needs Pillow); a fifth of them is held out. Pictures are turned
into tensors by the loader's workers, row by row.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_dataset
from sklearn.datasets import load_digits
from transformers import AutoConfig, AutoModelForImageClassification

from accel_trainer import Trainer, TrainingArguments, set_seed


def load_images(folder: str | None) -> tuple[Dataset, list[str]]:
    """Return rows of `image` (height x width, or with colours last, 0 to 255) and `label`, and the labels' names."""
    if folder is None:
        digits = load_digits()
        images = (digits.images * 15.9375).astype("uint8")
        return Dataset.from_dict({"image": images, "label": digits.target}), [str(digit) for digit in range(10)]
    dataset = load_dataset("imagefolder", data_dir=folder, split="train")
    return dataset, dataset.features["label"].names


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder (default: a tiny ViT with fresh weights)")
    parser.add_argument("--images", help="folder with a folder for each class (default: scikit-learn's digits)")
    parser.add_argument("--output_dir", default="outputs/vision", help="default: %(default)s")
    parser.add_argument("--batch_size", type=int, default=32, help="of a process (default: %(default)s)")
    parser.add_argument("--num_epochs", type=float, default=6, help="default: %(default)s")
    parser.add_argument("--num_workers", type=int, default=0, help="that read images (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU although there is an accelerator")
    options = parser.parse_args(argv)
    set_seed(0)
    dataset, names = load_images(options.images)
    labels = {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {n: i for i, n in enumerate(names)},
    }
    if options.model is None:
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        config = AutoConfig.for_model("vit", image_size=8, patch_size=2, num_channels=1, **sizes, **labels)
        model = AutoModelForImageClassification.from_config(config)
    else:  # the head of another task is drawn anew
        model = AutoModelForImageClassification.from_pretrained(options.model, ignore_mismatched_sizes=True, **labels)
    size, channels = model.config.image_size, model.config.num_channels

    def to_tensors(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        pixels = []
        for image in rows["image"]:
            array = torch.from_numpy(np.array(image)).float() / 127.5 - 1
            array = array[None] if array.ndim == 2 else array[..., :3].movedim(-1, 0)
            array = torch.nn.functional.interpolate(array[None], (size, size), mode="bilinear", antialias=True)[0]
            pixels.append(array.expand(channels, -1, -1))
        return {"pixel_values": pixels, "labels": rows["label"]}

    parts = dataset.train_test_split(0.2, seed=0).with_transform(to_tensors)
    arguments = TrainingArguments(
        options.output_dir,
        num_train_epochs=options.num_epochs,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=4 * options.batch_size,
        learning_rate=2e-3 if options.model is None else 5e-5,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        dataloader_num_workers=options.num_workers,
        remove_unused_columns=False,  # `image` is what the transform reads
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="none",
        use_cpu=options.cpu,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()
    trainer.accelerator.print(f"accuracy {accuracy:.3f} on {len(parts['test'])} images that were held out")
    return accuracy


if __name__ == "__main__":
    main()
