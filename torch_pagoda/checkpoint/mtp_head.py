"""Reads the head of a checkpoint that predicts a further token (MTP, "next-n"), as a module of transformers' own."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .configs import causal_lm_class, load_config
from .loading import checkpoint_files, resolve_dtype
from .source import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_REFUSED = "speculative_config: method 'mtp'"
_OTHERS = "use method 'suffix' or 'draft_model'"
_SHARED = ("embed_tokens.", "shared_head.head.", "shared_head.weight")
"""What checkpoints store with a head although it is the model's."""


class MtpHead(nn.Module):
    """The first head of a model as a module that is called like a causal LM, with the hidden row of the token before.

    Args:
        model: of the checkpoint; only its classes, embeddings and head are used.

    Attributes:
        config: the model's, as transformers changes it for heads.
        mtp: transformers' module.
        embedding, output: qualified names of the model's weights that it shares.
        shared: qualified name of each in this module → in the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.modeling_layers import MtpModel

        super().__init__()
        self.mtp = MtpModel(model, 1)
        self.config = self.mtp.config
        names = {id(module): name for name, module in model.named_modules()}
        self.embedding = f"{names[id(model.get_input_embeddings())]}.weight"
        self.output = f"{names[id(model.get_output_embeddings())]}.weight"
        tied = self.mtp.shared_head.weight is self.mtp.embed_tokens.weight
        self.shared = {"mtp.embed_tokens.weight": self.embedding}
        if not tied:
            self.shared["mtp.shared_head.weight"] = self.output

    def get_input_embeddings(self) -> nn.Module:
        """The table of the model's embeddings."""
        return self.mtp.embed_tokens  # type: ignore[return-value]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        previous_hidden: torch.Tensor,
        use_cache: bool = False,
        return_dict: bool = True,
    ) -> Any:
        """Compute the logits ``[1, T, vocab]`` of the tokens two behind each hidden row.

        Args:
            input_ids: ``[1, T]``.
            position_ids: of these tokens, ``[1, T]``.
            previous_hidden: what the model's head read for the token before each, ``[1, T, hidden_size]``.
            use_cache, return_dict: as of a causal LM; there is no cache.
        """
        from transformers.modeling_outputs import CausalLMOutput

        hidden = self.mtp.forward_layer(0, previous_hidden, position_ids, None, input_ids=input_ids)
        return CausalLMOutput(logits=self.mtp._project_to_logits(hidden))


def load_mtp_head(
    source: str | os.PathLike[str],
    dtype: str | torch.dtype,
    trust_remote_code: bool,
    head_source: str | os.PathLike[str] | None = None,
) -> MtpHead:
    """Read the first head of a checkpoint, its tensors mapped from the files.

    Args:
        source: folder or hub id of the model.
        dtype: as for ``LLM``.
        trust_remote_code: as for ``LLM``.
        head_source: that of a checkpoint of the head alone; None: the model's own holds it.

    Raises:
        ValueError: there is none, or none that transformers' generic head stands for.
    """
    name, config = load_config(source, trust_remote_code)
    model_class: Any = causal_lm_class(config)
    tensors = _float_tensors(source, name, dtype)
    if model_class is None or tensors is None:
        raise ValueError(
            f"{_REFUSED} reads safetensors of a class of transformers' own, and model={name!r} is none; {_OTHERS}"
        )
    own = tensors
    if head_source is not None:
        name = os.fspath(head_source)
        given = _float_tensors(head_source, name, dtype)
        if given is None:
            raise ValueError(
                f"{_REFUSED} reads a config.json and safetensors, and model={name!r} holds none; {_OTHERS}"
            )
        own = given
    text = config.get_text_config(decoder=True)
    found = head_tensors(own, text.num_hidden_layers)
    if not found:
        raise ValueError(
            f"{_REFUSED} needs a head in the checkpoint, and model={name!r} holds no tensors "
            f"'model.layers.{text.num_hidden_layers}.*' or 'mtp.*'; {_OTHERS}"
        )
    for key, tensor in found.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ValueError(
                f"{_REFUSED} does not read quantized heads yet, and {key!r} of model={name!r} is {tensor.dtype}; "
                f"{_OTHERS}"
            )
    kept = resolve_dtype(dtype) or getattr(text, "dtype", None) or next(iter(found.values())).dtype
    try:
        head, skeleton = _without_weights(model_class, config, kept)
        _load(head, skeleton, found, kept)
        _share(head, tensors, kept)
    except Exception as error:
        raise ValueError(
            f"{_REFUSED} cannot use the head of model={name!r}, a {model_class.__name__}: {first_line(error)}; "
            f"{_OTHERS}"
        ) from error
    return head.eval().requires_grad_(False)


def _float_tensors(
    source: str | os.PathLike[str], name: str, dtype: str | torch.dtype
) -> Mapping[str, torch.Tensor] | None:
    """The tensors of a checkpoint; None where it has no safetensors.

    Raises:
        ValueError: they are quantized.
    """
    files = checkpoint_files(source, dtype)
    if files is None:
        return None
    if files.read is not None:
        raise ValueError(
            f"{_REFUSED} does not read heads of quantized checkpoints yet, and model={name!r} is "
            f"{files.texts.get('quantized by', 'one')}; {_OTHERS}"
        )
    return files.tensors()


def head_skeleton(model_class: Any, config: Any, dtype: torch.dtype) -> MtpHead:
    """Return the head that a model of this class and configuration would have, on the meta device.

    Raises:
        ValueError: transformers' generic head does not stand for it.
    """
    try:
        return _without_weights(model_class, config, dtype)[0]
    except Exception as error:
        raise ValueError(
            f"{_REFUSED} knows no head of a {model_class.__name__}: {first_line(error)}; {_OTHERS}"
        ) from error


def _without_weights(model_class: Any, config: Any, dtype: torch.dtype) -> tuple[MtpHead, PreTrainedModel]:
    from transformers.modeling_utils import local_torch_dtype

    with torch.device("meta"), local_torch_dtype(dtype):
        skeleton = _skeleton(model_class, config, dtype)
        return MtpHead(skeleton), skeleton


def head_tensors(tensors: Mapping[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """Return the tensors of the first head, by their names in the file without what stands before the layer.

    Args:
        tensors: of the checkpoint.
        num_layers: of the model; the head is the layer behind them (DeepSeek, GLM), or ``mtp.*`` (Qwen).
    """
    layer = re.compile(rf"^(?:.*\.)?(layers\.{num_layers}\..+)$")
    first = re.compile(r"^mtp\.(?!layers\.[1-9])(.+)$")
    found = {}
    for name, tensor in tensors.items():
        match = layer.match(name) or first.match(name)
        if match and not any(shared in match[1] for shared in _SHARED):
            found[match[1]] = tensor
    return found


def _skeleton(model_class: Any, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights, whose config says what its heads are like."""
    config = copy.deepcopy(config)
    if getattr(model_class, "config_class", None) is type(config).sub_configs.get("text_config"):
        config = config.get_text_config()
    text = config.get_text_config(decoder=True)
    text.num_mtp_layers = 1
    for kinds in ("layer_types", "mlp_layer_types"):
        own = getattr(text, f"mtp_{kinds}", None)
        if getattr(text, kinds, None) is not None:
            last = "full_attention" if kinds == "layer_types" else getattr(text, kinds)[-1]
            setattr(text, f"mtp_{kinds}", list(own)[:1] if own else [last])
    return model_class._from_config(config, dtype=dtype)  # type: ignore[no-any-return]


def _load(head: MtpHead, skeleton: PreTrainedModel, found: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Give the head its tensors, as transformers converts them."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    mtp = head.mtp
    renamed: Any = mtp.get_weight_conversions(skeleton)
    loading = LoadStateDictConfig(weight_mapping=renamed, dtype=dtype)
    report, _ = convert_and_load_state_dict_in_model(model=mtp, state_dict=dict(found), load_config=loading)
    mtp._adjust_missing_and_unexpected_keys(report)
    for what, keys in (("lacks", report.missing_keys), ("does not know", report.unexpected_keys)):
        if keys:
            raise ValueError(f"it {what} {min(keys)!r}")
    if report.mismatched_keys:
        raise ValueError(f"{min(report.mismatched_keys)[0]!r} has another shape than its config implies")
    if mtp.rotary_emb is not None:
        mtp.rotary_emb = type(mtp.rotary_emb)(config=skeleton.config.get_text_config(decoder=True))


def _share(head: MtpHead, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Map the model's embeddings and head, which the head reads until it shares those of the program."""
    tied = head.mtp.shared_head.weight is head.mtp.embed_tokens.weight
    table = nn.Parameter(_stored(tensors, head.embedding).to(dtype), requires_grad=False)
    head.mtp.embed_tokens.weight = table
    own = table if tied else nn.Parameter(_stored(tensors, head.output).to(dtype), requires_grad=False)
    head.mtp.shared_head.weight = own
    left = [name for name, tensor in (*head.named_parameters(), *head.named_buffers()) if tensor.is_meta]
    if left:
        raise ValueError(f"nothing in the checkpoint is for {left[0]!r}")


def _stored(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The tensor of that name, also in a checkpoint whose language model is a part of the model."""
    names = [key for key in tensors if key.replace("language_model.", "").endswith(name)]
    if not names:
        raise ValueError(f"the checkpoint holds no {name!r}")
    return tensors[min(names, key=len)]
