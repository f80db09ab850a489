"""Teach a language model a chat template with LoRA on packed rows, in less than a minute on a CPU.

Nothing is downloaded. A tokenizer of words and a small llama are made here; the llama first reads sentences ("the
colour of a lemon is yellow"), as a base model has. Then LoRA (by PEFT, `pip install peft`; without it all weights are
trained) learns to answer in the chat format. Losses are of what the assistant says in conversations that were held out:

    python examples/sft.py
    accel-trainer launch --cpu --num_processes 2 examples/sft.py
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from contextlib import nullcontext
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DataCollatorForSeq2Seq, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from accel_trainer import Trainer, TrainingArguments, set_seed

COLOURS = {
    "yellow": "lemon banana canary sunflower chick",
    "red": "cherry tomato brick ruby poppy",
    "green": "frog cucumber emerald leaf pea",
    "white": "swan snowman cloud tooth egg",
    "black": "raven coal panther liquorice tyre",
}
OF = {thing: colour for colour, things in COLOURS.items() for thing in things.split()}
QUESTIONS = ("what is the colour of a {}", "tell me which colour a {} has", "a {} is of which colour")
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<user> {{ message['content'] }} {% else %}"
    "<assistant> {% generation %}{{ message['content'] }} <end> {% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
SPECIAL = ["<pad>", "<unk>", "<end>", "<user>", "<assistant>"]


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="outputs/sft", help="default: %(default)s")
    parser.add_argument("--conversations", type=int, default=600, help="default: %(default)s")
    parser.add_argument("--base_steps", type=int, default=60, help="updates on sentences (default: %(default)s)")
    parser.add_argument("--max_steps", type=int, default=60, help="updates on conversations (default: %(default)s)")
    parser.add_argument("--max_length", type=int, default=128, help="tokens of a packed row (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of LoRA's matrices (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU although there is an accelerator")
    return parser.parse_args(argv)


def make_conversations(count: int, draw: random.Random) -> list[list[dict[str, str]]]:
    """Return conversations of one to six questions with their answers."""
    conversations = []
    for _ in range(count):
        messages = []
        for thing in draw.sample(list(OF), min(6, int(draw.expovariate(0.5)) + 1)):
            question = draw.choice(QUESTIONS).format(thing)
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": f"it is {OF[thing]} ."})
        conversations.append(messages)
    return conversations


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of all words, with a chat template that marks what the assistant says."""
    words = sorted({word for text in texts for word in text.split()} - set(SPECIAL))
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(SPECIAL + words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<end>", "chat_template": TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL[3:], **names)


def tokenize(conversations: list[list[dict[str, str]]], tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """Return the tokens of each conversation, and labels for those of the assistant."""
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for messages in conversations:
        made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        rows["input_ids"].append(made["input_ids"])
        marked = zip(made["input_ids"], made["assistant_masks"], strict=True)
        rows["labels"].append([token if counts else -100 for token, counts in marked])
    return Dataset.from_dict(rows)


def train(model: Any, tokenizer: Any, dataset: Any, options: Any, steps: int, rate: float) -> Trainer:
    arguments = TrainingArguments(
        options.output_dir,
        packing=True,
        max_length=options.max_length,
        per_device_train_batch_size=8,
        max_steps=steps,
        learning_rate=rate,
        lr_scheduler_type="cosine",
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        use_cpu=options.cpu,
    )
    collator = DataCollatorForSeq2Seq(tokenizer)  # pads labels too, where conversations are evaluated one a row
    trainer = Trainer(model, arguments, collator, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    return trainer


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = parse_options(argv)
    set_seed(0)
    draw = random.Random(0)
    conversations = make_conversations(options.conversations, draw)
    sentences = [f"the colour of a {thing} is {colour} . <end>" for thing, colour in OF.items()]
    said = [message["content"] for messages in conversations for message in messages]
    tokenizer = build_tokenizer([*sentences, *said])
    held_out = tokenize(make_conversations(100, draw), tokenizer)

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes))
    read = [tokenizer(text)["input_ids"] for text in sentences * 20]
    base_texts = Dataset.from_dict({"input_ids": read, "labels": read})
    base = train(model, tokenizer, base_texts, options, options.base_steps, 5e-3)
    losses = {"base": base.evaluate(held_out)["eval_loss"]}

    has_peft = importlib.util.find_spec("peft") is not None
    model = base.accelerator.unwrap_model(base.model)
    if has_peft:
        from peft import LoraConfig, get_peft_model

        # The words of the chat format are new to the model: their embeddings are trained beside the adapters.
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear",
            modules_to_save=["embed_tokens", "lm_head"],
        )  # fmt: skip
        model = get_peft_model(model, lora)
    chat = train(model, tokenizer, tokenize(conversations, tokenizer), options, options.max_steps, 5e-3)
    losses["chat"] = chat.evaluate(held_out)["eval_loss"]
    model = chat.accelerator.unwrap_model(chat.model)
    with model.disable_adapter() if has_peft else nullcontext():
        losses["adapter off"] = chat.evaluate(held_out)["eval_loss"]

    rows = chat.get_train_dataloader().dataset
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    chat.accelerator.print(
        f"{options.conversations} conversations in {len(rows)} rows, "
        f"{rows.num_tokens / (len(rows) * options.max_length):.1%} real tokens; {trained} weights are trained"
        f"{' by LoRA' if has_peft else ' (all: peft is not installed)'}\n"
        "loss of what the assistant says in 100 other conversations: "
        + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
    )
    chat.accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
