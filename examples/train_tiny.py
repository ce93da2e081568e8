"""Train the small Llama that `examples/tiny-pydoc` ships, from nothing but a Python installation.

The text is the documentation that every Python carries with it: the docstrings and comments of the standard
library's modules, the docstrings of its compiled modules, and the language reference behind `help()`. With
the defaults this takes less than half an hour on two CPU cores and writes a folder that
`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load without a network.

    python examples/train_tiny.py --out /tmp/tiny-pydoc
    python examples/train_tiny.py --out /tmp/tiny-pydoc --minutes 5

With `--draft` it trains a draft model and a head for a folder that it wrote before, see `speculative_config`, each
for so many minutes:

    python examples/train_tiny.py --draft examples/tiny-pydoc --out examples --minutes 9 --learning-rate 1e-3

For one version of Python and torch and one number of threads a run can be repeated: the seed is fixed, files
are read in sorted order, and the number of steps is fixed as long as the time limit is not reached before.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydoc_text import HELD_OUT_PERCENT, Document, gather_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from train_drafts import train_drafts
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 1234
VOCAB_SIZE = 2048
SEQUENCE_LENGTH = 256
CONTEXT_LENGTH = 1024
END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"

MODEL_README = """\
# tiny-pydoc

A Llama of {parameters:,} parameters that continues English text in the manner of Python's
documentation. It exists so that examples and tests have a real, trained model that needs no download.
It knows nothing and answers nothing: it has read the same small text many times, much of it by heart, as
the two losses below show.

- Architecture: `LlamaForCausalLM`, 4 layers, hidden size 256, 4 query heads and 2 key/value heads of
  size 128, MLP 576, tied embeddings, byte-level BPE with 2,048 tokens. Weights are stored in bf16
  ({megabytes:.1f} MB).
- Trained on windows of {length} tokens; positions up to {context} work, with less and less sense.
- Made by `examples/train_tiny.py` (fixed seed) with Python {python} and torch {torch}: {steps:,} steps,
  {tokens_seen:,} tokens = {epochs:.1f} epochs, {cpu_minutes:.0f} CPU minutes.

| loss | nats per token |
|---|---|
| training text (its first {sample:,} tokens) | {training_loss:.3f} |
| held-out modules ({held_out_percent} % of the names, {held_out_tokens:,} tokens) | {held_out_loss:.3f} |

On the held-out text that is {bits:.2f} bits per character.

## Text and license

{documents} documents, {training_tokens:,} training tokens: the prose of docstrings and comments in the
standard library of Python {python}, of the docstrings of its compiled modules, and of the language
reference (`pydoc_data.topics`); code, tables and duplicates are left out. The text is Copyright (c)
Python Software Foundation, licensed under the Python Software Foundation License Version 2 (PSF-2.0,
https://docs.python.org/3/license.html); some modules carry further permissive notices of their authors,
which that page lists. The weights and the tokenizer are derived from it and offered under the same
license.
"""


def train_tokenizer(documents: list[Document]) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE of VOCAB_SIZE tokens; any string can be encoded and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 3.9 M parameters: grouped queries, and the head size 128 that NPU attention takes."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def pack(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """All documents as one int64 stream, each after an end-of-text token."""
    stream: list[int] = []
    for document in documents:
        stream.append(tokenizer.eos_token_id)
        stream.extend(tokenizer(document.text, verbose=False)["input_ids"])
    return torch.tensor(stream)


def batches(stream: torch.Tensor, batch_size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield [batch_size, SEQUENCE_LENGTH + 1] windows for ever; each epoch cuts and shuffles anew."""
    while True:
        start = int(torch.randint(SEQUENCE_LENGTH, (), generator=generator))
        windows = stream[start:].unfold(0, SEQUENCE_LENGTH + 1, SEQUENCE_LENGTH)
        order = torch.randperm(len(windows), generator=generator)
        for index in range(0, len(order) - batch_size + 1, batch_size):
            yield windows[order[index : index + batch_size]]


def next_token_loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats per token of windows [batch, length + 1]."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.inference_mode()
def evaluate(model: nn.Module, stream: torch.Tensor) -> float:
    """Mean loss in nats per token over a stream, in fp32."""
    model.eval()
    windows = stream.unfold(0, SEQUENCE_LENGTH + 1, SEQUENCE_LENGTH)
    losses = [float(next_token_loss(model, chunk)) * len(chunk) for chunk in windows.split(8)]
    model.train()
    return sum(losses) / len(windows)


def make_optimizers(model: nn.Module, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon (https://kellerjordan.github.io/posts/muon/) for the layers' matrices, AdamW for the rest.

    With few steps Muon is worth its cost: after 280,000 tokens the held-out loss was 4.9 nats per token where
    AdamW alone, for all parameters, had 5.7.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed_tokens" not in name else others).append(parameter)
    rate, decay = options.learning_rate, options.weight_decay
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def train(model: LlamaForCausalLM, stream: torch.Tensor, held_out: torch.Tensor, options: argparse.Namespace) -> int:
    """Train in place until `options.steps` or `options.minutes` is reached, and return the number of steps.

    The learning rate follows a cosine over whichever of the two runs out first, so a slow machine that hits
    the time limit still ends with a small rate.
    """
    optimizers = make_optimizers(model, options)
    data = batches(stream, options.batch_size, torch.Generator().manual_seed(SEED))
    warm_up = 100
    begin = time.perf_counter()
    average = 0.0
    model.train()
    for step in range(1, options.steps + 1):
        elapsed = time.perf_counter() - begin
        progress = max((step - 1) / options.steps, elapsed / (60 * options.minutes))
        if progress >= 1:
            return step - 1
        rate = options.learning_rate * min(1.0, step / warm_up) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        # bf16 products are about 1.5 times as fast on CPUs that have them; the weights stay in fp32.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bf16):
            loss = next_token_loss(model, next(data))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        average += (loss.item() - average) * max(0.02, 1 / step)
        if step % 250 == 0:
            speed = step * options.batch_size * SEQUENCE_LENGTH / (time.perf_counter() - begin)
            print(
                f"step {step}/{options.steps}  loss {average:.3f}  held out {evaluate(model, held_out):.3f}  "
                f"lr {rate:.1e}  {speed:,.0f} tok/s",
                flush=True,
            )
    return options.steps


@dataclass(frozen=True)
class Figures:
    """What a run measured; losses are in nats per token."""

    documents: int
    training_tokens: int
    held_out_tokens: int
    parameters: int
    steps: int
    tokens_seen: int
    training_loss: float
    held_out_loss: float
    held_out_characters: int
    cpu_minutes: float


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, figures: Figures, folder: Path) -> None:
    """Write weights, configuration, tokenizer and the README of the model folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.chmod(0o644)  # safetensors creates it for its owner only
    bits = figures.held_out_loss / math.log(2) * figures.held_out_tokens / figures.held_out_characters
    (folder / "README.md").write_text(
        MODEL_README.format(
            **asdict(figures),
            bits=bits,
            python=platform.python_version(),
            torch=torch.__version__.split("+")[0],
            epochs=figures.tokens_seen / figures.training_tokens,
            megabytes=weights.stat().st_size / 1e6,
            sample=8 * figures.held_out_tokens,
            length=SEQUENCE_LENGTH,
            context=CONTEXT_LENGTH,
            held_out_percent=HELD_OUT_PERCENT,
        ),
        encoding="utf-8",
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--draft", type=Path, help="train a draft model and a head for this folder")
    parser.add_argument("--steps", type=int, default=5000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=30, help="stop after so long (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak rate (default: %(default)s)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of matrices (default: %(default)s)")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="train with fp32 products")
    return parser.parse_args()


def train_draft(options: argparse.Namespace) -> None:
    """Train what drafts for the model of `options.draft`, and write its folders."""
    documents = gather_documents()
    tokenizer = AutoTokenizer.from_pretrained(options.draft)
    stream = pack([document for document in documents if not document.held_out], tokenizer)
    held_out = pack([document for document in documents if document.held_out], tokenizer)
    target = AutoModelForCausalLM.from_pretrained(options.draft, dtype=torch.float32, attn_implementation="eager")
    train_drafts(target, tokenizer, stream, held_out, options)


def main() -> None:
    """Gather the text, train the tokenizer and the model, and write the folder."""
    options = parse_arguments()
    torch.manual_seed(SEED)
    torch.set_num_threads(options.threads)
    if options.draft is not None:
        train_draft(options)
        return

    documents = gather_documents()
    training = [document for document in documents if not document.held_out]
    tokenizer = train_tokenizer(training)
    stream = pack(training, tokenizer)
    held_out = pack([document for document in documents if document.held_out], tokenizer)
    print(f"{len(documents)} documents, {len(stream):,} training tokens, {len(held_out):,} held out", flush=True)

    model = make_model(tokenizer)
    model.set_attn_implementation("eager")  # for short windows on a CPU faster than fused attention
    steps = train(model, stream, held_out, options)

    # Half the size on disk; the losses below are those of the rounded weights, computed in fp32.
    nn.Module.to(model, torch.bfloat16)
    nn.Module.to(model, torch.float32)
    figures = Figures(
        documents=len(documents),
        training_tokens=len(stream),
        held_out_tokens=len(held_out),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        steps=steps,
        tokens_seen=steps * options.batch_size * SEQUENCE_LENGTH,
        training_loss=evaluate(model, stream[: 8 * len(held_out)]),
        held_out_loss=evaluate(model, held_out),
        held_out_characters=sum(len(document.text) for document in documents if document.held_out),
        cpu_minutes=time.process_time() / 60,
    )
    print(figures)
    nn.Module.to(model, torch.bfloat16)
    save(model, tokenizer, figures, options.out)


if __name__ == "__main__":
    main()
