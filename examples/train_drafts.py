"""Train what drafts for a model of `train_tiny.py`: a smaller draft model, and a head of the model itself.

What matters is that they say what the model says. So the model writes their text: it samples the beginning of each
sequence, and continues it greedily; they learn its probabilities at each place.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_layers import MtpModel

SEED = 1234
LENGTH = 128
SEQUENCES = 2048
GENERATED_TOGETHER = 256
PROMPT_LENGTH, SAMPLED_LENGTH, HELD_OUT_LENGTH = 4, 24, 32
DRAFT_LAYERS, DRAFT_WIDTH = 2, 448

Texts = tuple[torch.Tensor, torch.Tensor]
"""Tokens [sequences, LENGTH + 1] that a model wrote, and its hidden rows [sequences, LENGTH, hidden size], fp16."""

Student = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens [batch, length], the model's hidden rows of these) → its own hidden rows, which the output matrix reads."""

DRAFT_README = """\
# {name}

A draft model of {parameters:,} parameters for `examples/tiny-pydoc`, with the same tokenizer:
`LLM("examples/tiny-pydoc", speculative_config={{"method": "draft_model", "model": "examples/{name}"}})`.

It began as the first two of the model's four layers, each with the {width} largest of its MLP's 576 rows.
`examples/train_tiny.py --draft` trained it on text that the model wrote to give the same probabilities:
{steps:,} steps of {batch} x {length} tokens. Where the model continues held-out modules greedily, its likeliest token
is the model's at {share:.1%} of the places.

The text and the license are those of `examples/tiny-pydoc`.
"""

HEAD_README = """\
# {name}

A head for multi-token prediction for `examples/tiny-pydoc`, {parameters:,} parameters:
`LLM("examples/tiny-pydoc", speculative_config={{"method": "mtp", "model": "examples/{name}"}})`.

It is one layer like the model's, behind a projection of a token's embedding and the model's hidden row of the token
before it. The names of its tensors are those of DeepSeek-V3's checkpoints. `examples/train_tiny.py --draft`
trained it on text that the model wrote to give the same probabilities: {steps:,} steps of {batch} x {length} tokens.
Where the model continues held-out modules greedily, its likeliest token is the model's at {share:.1%} of the places.

The text and the license are those of `examples/tiny-pydoc`.
"""


@torch.inference_mode()
def write(target: LlamaForCausalLM, prompts: torch.Tensor, sampled: int, generator: torch.Generator) -> Texts:
    """Continue prompts [sequences, tokens]: with samples until ``sampled`` tokens are there, then greedily."""
    cache = DynamicCache()
    tokens, newest = prompts, prompts
    rows = []
    while tokens.shape[1] <= LENGTH:
        hidden = target.model(input_ids=newest, past_key_values=cache, use_cache=True).last_hidden_state
        rows.append(hidden.half())
        logits = target.lm_head(hidden[:, -1])
        newest = logits.argmax(-1, keepdim=True)
        if tokens.shape[1] < sampled:
            newest = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, newest], 1)
    return tokens.clone(), torch.cat(rows, 1).clone()


def write_much(target: LlamaForCausalLM, stream: torch.Tensor) -> Texts:
    """Write SEQUENCES texts that begin with a few tokens of a stream, and go on as the model samples."""
    generator = torch.Generator().manual_seed(SEED)
    parts = []
    for _ in range(SEQUENCES // GENERATED_TOGETHER):
        places = torch.randint(len(stream) - PROMPT_LENGTH, (GENERATED_TOGETHER, 1), generator=generator)
        prompts = stream[places + torch.arange(PROMPT_LENGTH)]
        parts.append(write(target, prompts, SAMPLED_LENGTH, generator))
    tokens, rows = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(rows)


def continue_held_out(target: LlamaForCausalLM, stream: torch.Tensor) -> Texts:
    """Greedy continuations of a part of a stream that neither the model nor what drafts for it has seen."""
    prompts = stream.unfold(0, HELD_OUT_LENGTH, 8 * HELD_OUT_LENGTH)
    return write(target, prompts, 0, torch.Generator())


@torch.no_grad()
def make_draft(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """The first layers of a model with the rows of their MLPs that count most, its embeddings and its last norm."""
    given = target.config.to_dict() | {"num_hidden_layers": DRAFT_LAYERS, "intermediate_size": DRAFT_WIDTH}
    given.pop("layer_types", None)
    draft = LlamaForCausalLM(LlamaConfig.from_dict(given)).float()
    draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    for own, layer in zip(draft.model.layers, target.model.layers, strict=False):
        state = layer.state_dict()
        up, down = state["mlp.up_proj.weight"], state["mlp.down_proj.weight"]
        kept = (up.norm(dim=1) * down.norm(dim=0)).topk(DRAFT_WIDTH).indices.sort().values
        for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            state[name] = state[name][kept]
        state["mlp.down_proj.weight"] = down[:, kept]
        own.load_state_dict(state)
    return draft


@torch.no_grad()
def make_head(target: LlamaForCausalLM) -> MtpModel:
    """A head that begins as the model's first layer, and does not look at hidden rows yet."""
    model = copy.copy(target)
    model.config = copy.deepcopy(target.config)
    model.config.num_mtp_layers = 1
    head = MtpModel(model, 1).float()
    (own,) = head.layers
    size = target.config.hidden_size
    own.mtp_block.load_state_dict(target.model.layers[0].state_dict())
    own.post_norm.load_state_dict(target.model.norm.state_dict())
    own.enorm.weight.fill_(float(target.model.embed_tokens.weight.square().mean().sqrt()))
    own.eh_proj.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], 1))
    return head


def rows_of_draft(draft: LlamaForCausalLM) -> Student:
    """Its hidden rows."""
    return lambda tokens, hidden: draft.model(input_ids=tokens, use_cache=False).last_hidden_state


def rows_of_head(head: MtpModel) -> Student:
    """Its hidden rows; each reads the model's of the token before."""

    def run(tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        before = functional.pad(hidden[:, :-1], (0, 0, 1, 0))
        return head.forward_layer(0, before, torch.arange(tokens.shape[1])[None], None, input_ids=tokens)

    return run


@torch.inference_mode()
def share_of_same(student: Student, output: torch.Tensor, texts: Texts) -> float:
    """Share of the places behind the prompts where the student's likeliest token is the one that follows."""
    same = []
    for tokens, rows in zip(texts[0].split(32), texts[1].split(32), strict=True):
        own = student(tokens[:, :-1], rows.float())[:, HELD_OUT_LENGTH - 1 :]
        same.append((own @ output.T).argmax(-1) == tokens[:, HELD_OUT_LENGTH:])
    return float(torch.cat(same).float().mean())


def train(
    module: nn.Module, student: Student, target: LlamaForCausalLM, texts: Texts, options: argparse.Namespace
) -> int:
    """Train in place until `options.steps` or `options.minutes` is reached, and return the number of steps.

    AdamW has all parameters: Muon multiplies in bf16, which costs more than the rest on CPUs without such products.
    """
    output = target.lm_head.weight.detach()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    own_output = module.lm_head.weight if isinstance(module, LlamaForCausalLM) else output
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    generator = torch.Generator().manual_seed(SEED)
    begin, average = time.perf_counter(), 0.0
    for step in range(1, options.steps + 1):
        progress = max((step - 1) / options.steps, (time.perf_counter() - begin) / (60 * options.minutes))
        if progress >= 1:
            return step - 1
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, step / 50) * 0.5 * (1 + math.cos(math.pi * progress))
        chosen = torch.randint(len(texts[0]), (options.batch_size,), generator=generator)
        tokens, hidden = texts[0][chosen, :-1], texts[1][chosen].float()
        wanted = (hidden @ output.T).flatten(0, 1).softmax(-1)
        logits = student(tokens, hidden) @ own_output.T
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average += (loss.item() - average) * max(0.02, 1 / step)
        if step % 50 == 0:
            print(f"step {step}  loss {average:.3f}  {(time.perf_counter() - begin) / step:.2f} s a step", flush=True)
    return options.steps


def round_weights(module: nn.Module) -> None:
    """Round the weights to those of the file, and keep computing in fp32."""
    module.to(torch.bfloat16)
    module.to(torch.float32)


def save_head(head: MtpModel, target: LlamaForCausalLM, folder: Path) -> None:
    """Write the tensors of a head by the names that checkpoints with heads have, and the model's configuration."""
    names = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
    tensors = {}
    for name, tensor in head.layers[0].state_dict().items():
        for own, stored in names.items():
            name = stored + name.removeprefix(own) if name.startswith(own) else name
        tensors[f"model.layers.{target.config.num_hidden_layers}.{name}"] = tensor.to(torch.bfloat16)
    config = copy.deepcopy(target.config)
    config.num_mtp_layers = 1
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def train_drafts(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stream: torch.Tensor,
    held_out: torch.Tensor,
    options: argparse.Namespace,
) -> None:
    """Train a draft model and a head for `target`, and write their folders into `options.out`."""
    target.requires_grad_(False)
    texts, unseen = write_much(target, stream), continue_held_out(target, held_out)
    print(f"{len(texts[0])} texts of {LENGTH} tokens", flush=True)
    draft, head = make_draft(target), make_head(target)
    head.requires_grad_(False)
    head.layers.requires_grad_(True)
    students = {
        "draft": (draft, rows_of_draft(draft), DRAFT_README),
        "mtp": (head.layers, rows_of_head(head), HEAD_README),
    }
    for kind, (module, student, readme) in students.items():
        output = module.lm_head.weight if module is draft else target.lm_head.weight
        print(f"{kind}: the model's token at {share_of_same(student, output, unseen):.1%} before", flush=True)
        steps = train(module, student, target, texts, options)
        round_weights(module)
        share = share_of_same(student, output, unseen)
        print(f"{kind}: the model's token at {share:.1%} of the places after {steps} steps", flush=True)
        folder = options.out / f"{options.draft.name}-{kind}"
        folder.mkdir(parents=True, exist_ok=True)
        if module is draft:
            draft.to(torch.bfloat16).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        else:
            save_head(head, target, folder)
        (folder / "model.safetensors").chmod(0o644)  # safetensors creates it for its owner only
        (folder / "README.md").write_text(
            readme.format(
                name=folder.name,
                parameters=sum(parameter.numel() for parameter in module.parameters()),
                width=DRAFT_WIDTH,
                steps=steps,
                batch=options.batch_size,
                length=LENGTH,
                share=share,
            ),
            encoding="utf-8",
        )
