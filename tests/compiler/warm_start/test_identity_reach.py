"""What ``forward`` reads is part of a module's identity: everything that its code can name, through all files that
are not the framework's; and what cannot be told is refused."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.live_module.describer import CannotIdentify
from torch_pagoda.compiler.warm_start.identity import identity

from tiny_models import build_tiny_model

_numbers = itertools.count()


def of(model):
    """The digest of a model; for one that is not stored a text that no other has."""
    try:
        return told(model)
    except CannotIdentify as error:
        return f"{next(_numbers)}: {error}"


def told(model):
    return identity(model, CompileOptions(), "").digest


@dataclass
class Files:
    """Source files in a package of their own, and the module ``Net()`` of its file ``model``.

    Attributes:
        package: the package's name.
        loaded: its Python modules by name.
    """

    package: str
    loaded: dict[str, types.ModuleType] = field(default_factory=dict)

    def __getattr__(self, name):
        return self.loaded[name]

    @property
    def net(self):
        return self.loaded["model"].Net()


@pytest.fixture
def load(tmp_path, monkeypatch):
    """``load(model=source, helper=source)`` writes the files and imports them; once more with ``package=`` for a
    later process that finds others under the same names."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(package="", **sources):
        package = package or f"remote_code_{next(_numbers)}"
        root = tmp_path / str(next(_numbers))
        folder = root / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        for name, source in sources.items():
            (folder / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(root))
            files = Files(package)
            files.loaded = {name: importlib.import_module(f"{package}.{name}") for name in sources}
        return files

    yield load
    for name in [name for name in sys.modules if name.startswith("remote_code_")]:
        del sys.modules[name]


def net(expression, head="", body=""):
    """The source of a module whose forward computes ``expression`` of x."""
    return (
        "import enum, functools, os\nimport torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
        f"{head}\n\nclass Net(nn.Module):\n    {body or 'pass'}\n"
        f"    def __init__(self):\n        super().__init__()\n        self.linear = nn.Linear(4, 4)\n"
        f"    def forward(self, x):\n        return {expression}\n"
    )


@dataclass
class Case:
    """A kind of thing that forward reads.

    Attributes:
        model: source of the module.
        place, old, new: where in memory a value stands, and two values of it.
        helper: source of another file.
    """

    model: str
    place: str
    new: str
    helper: str = ""


HELPER = "from . import helper"
IN_MEMORY = {
    "class attribute": Case(net("x * self.gain", body="gain = 0.5"), "model.Net.gain", "2.0"),
    "dict of a class": Case(net("x * self.gains['a']", body="gains = {'a': 0.5}"), "model.Net.gains['a']", "2.0"),
    "attribute of a base": Case(
        net("x * self.gain", "class Base:\n    gain = 0.5", "base = Base").replace(
            "Net(nn.Module)", "Net(Base, nn.Module)"
        ),
        "model.Base.gain",
        "2.0",
    ),
    "number of the file": Case(net("x * GAIN", "GAIN = 0.5"), "model.GAIN", "2.0"),
    "tuple of the file": Case(net("x * GAINS[1]", "GAINS = (1, 0.5)"), "model.GAINS", "(1, 2.0)"),
    "dict of the file": Case(net("x * GAINS['a']", "GAINS = {'a': 0.5}"), "model.GAINS['a']", "2.0"),
    "tensor of the file": Case(net("x * GAIN", "GAIN = torch.tensor([0.5])"), "model.GAIN[0]", "2.0"),
    "list of functions": Case(
        net("FUNCTIONS[0](x)", "def f(x): return x\n\nFUNCTIONS = [f]"), "model.FUNCTIONS[0]", "lambda x: -x"
    ),
    "function in a closure": Case(
        net("f(x)", "def outer(k):\n    def f(x): return x * k\n    return f\n\nf = outer(1)"),
        "model.f",
        "model.outer(2)",
    ),
    "number taken from another file": Case(
        net("x * GAIN", "from .helper import GAIN"), "model.GAIN", "2.0", "GAIN = 0.5"
    ),
    "number of another file": Case(net("x * helper.GAIN", HELPER), "helper.GAIN", "2.0", "GAIN = 0.5"),
    "number behind a function of another file": Case(
        net("scaled(x)", "from .helper import scaled"),
        "helper.GAIN",
        "2.0",
        "GAIN = 0.5\ndef scaled(x): return x * GAIN",
    ),
    "function of another file": Case(
        net("helper.scaled(x)", HELPER), "helper.scaled", "lambda x: -x", "def scaled(x): return x"
    ),
    "number imported inside": Case(
        net("self.read(x)", "", "def read(self, x):\n        from .helper import GAIN\n        return x * GAIN"),
        "helper.GAIN",
        "2.0",
        "GAIN = 0.5",
    ),
    "number behind an alias of a file": Case(
        net("(lambda h: x * h.GAIN)(helper)", HELPER), "helper.GAIN", "2.0", "GAIN = 0.5"
    ),
    "value of an Enum": Case(
        net("x * Gain.LOW.value", "class Gain(enum.Enum):\n    LOW = 0.5"), "model.Gain.LOW._value_", "2.0"
    ),
    "attribute of an object's class": Case(
        net(
            "THING(x)",
            "class Thing:\n    gain = 0.5\n    def __call__(self, x): return x * self.gain\n\nTHING = Thing()",
        ),
        "model.Thing.gain",
        "2.0",
    ),
    "attribute of a class that forward makes": Case(
        net(
            "Thing()(x)",
            "class Thing:\n    gain = 0.5\n    def __init__(self): self.k = self.gain\n"
            "    def __call__(self, x): return x * self.k",
        ),
        "model.Thing.gain",
        "2.0",
    ),
    "method that a method calls": Case(
        net("self.scaled(x)", "", "def scaled(self, x): return x"), "model.Net.scaled", "lambda self, x: -x"
    ),
    "property": Case(
        net("x * self.gain", "", "@property\n    def gain(self): return 0.5"),
        "model.Net.gain",
        "property(lambda self: 2.0)",
    ),
    "attribute of a function": Case(net("x * f.gain", "def f(x): return x\nf.gain = 0.5"), "model.f.gain", "2.0"),
    "default of a function": Case(net("f(x)", "def f(x, k=0.5): return x * k"), "model.f.__defaults__", "(2.0,)"),
    "cached function": Case(
        net("f(x)", "@functools.lru_cache\ndef g(x): return x\n\nf = g"),
        "model.f",
        "functools.lru_cache(lambda x: -x)",
    ),
}


@pytest.mark.parametrize("name", IN_MEMORY)
def test_what_forward_reads_in_memory_is_part_of_it(load, name):
    case = IN_MEMORY[name]
    sources = {"helper": case.helper} if case.helper else {}
    files = load(**sources, model=case.model)
    model = files.net
    before = told(model)
    assert told(model) == before
    import functools

    exec(f"{case.place} = {case.new}", {**files.loaded, "functools": functools, "model": files.loaded["model"]})
    assert of(model) != before


def test_a_method_that_nothing_names_is_not_described(load):
    """Otherwise every model would be refused whose class can write files."""
    body = "def save(self, path):\n        open(path)"
    assert told(load(model=net("x", "", body)).net)


FILES = {
    "the model's": ("model", "# one", "# two"),
    "one that it imports": ("helper", "def f(): return 1", "def f(): return 2"),
    "one behind it": ("deep", "K = 1", "K = 2"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_bytes_of_all_files_are_part_of_it(load, name):
    changed, *versions = FILES[name]
    prints = set()
    package = ""
    for text in versions:
        sources = {
            "deep": "def g(): return 0\n",
            "helper": "from .deep import g\ndef f(): return 0\n",
            "model": net("x", HELPER),
        }
        sources[changed] += text
        files = load(package, **sources)
        package = files.package
        prints.add(told(files.net))
    assert len(prints) == 2


UNTOLD = {
    "a variable": ("os.environ.get('PAGODA_TEST_GAIN', '1')", "names 'environ'"),
    "getenv": ("os.getenv('PAGODA_TEST_GAIN')", "names 'getenv'"),
    "a subscript": ("os.environ['PAGODA_TEST_GAIN']", "names 'environ'"),
    "whether there is one": ("'PAGODA_TEST_GAIN' in os.environ", "names 'environ'"),
    "variables taken from os": ("environ.get('PAGODA_TEST_GAIN')", "names 'environ'"),
    "a variable that is computed": ("os.environ.get('PAGODA_' + self.name)", "names 'environ'"),
    "all variables": ("dict(os.environ)", "names 'environ'"),
    "variables by another name": ("ALL.get('PAGODA_TEST_GAIN')", "has 'environ' by another name"),
    "a file": ("open('gain.txt').read()", "names 'open'"),
    "a file by another name": ("READ('gain.txt').read()", "has 'open' by another name"),
    "globals": ("globals()['GAIN']", "names 'globals'"),
    "source text": ("eval('GAIN')", "names 'eval'"),
    "an import by name": ("importlib.import_module('helper')", "names 'import_module'"),
    "an iterator": ("next(COUNT)", "nothing is known about a itertools.count"),
}


@pytest.mark.parametrize("kind", UNTOLD)
def test_what_cannot_be_told_is_refused(load, kind):
    expression, message = UNTOLD[kind]
    head = "import importlib, itertools\nfrom os import environ\nALL, READ, GAIN = environ, open, 2\n"
    head += "COUNT = itertools.count()"
    with pytest.raises(CannotIdentify, match=message):
        told(load(model=net(f"(x, {expression})", head)).net)
    assert told(load(model=net("(x, self.eval, self.open)", head)).net), "attributes are called so, too"


def test_a_file_that_is_imported_later_is_refused(load):
    files = load(
        model=net("self.read(x)", "", "def read(self, x):\n        from .helper import GAIN\n        return x")
    )
    with pytest.raises(CannotIdentify, match=r"imports .*helper when it runs; it is not loaded yet"):
        told(files.net)


def doubled(x, *args, **kwargs):
    return 2 * x


FUNCTIONAL = ("silu", "softmax", "linear")


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_patched_functional_is_part_of_it(load, monkeypatch, name):
    model = load(model=net(f"F.{name}(x)")).net
    before = of(model)
    monkeypatch.setattr(torch.nn.functional, name, doubled)
    assert of(model) != before
    monkeypatch.setattr(torch.nn.functional, name, torch.nn.functional.gelu)
    assert of(model) != before


@pytest.mark.parametrize(
    "target",
    [
        (nn.Linear, "forward"),
        (nn.Module, "__call__"),
        (torch.Tensor, "softmax"),
        (torch, "rsqrt"),
        (nn.functional, "linear"),
        (nn.functional, "silu"),
        (torch._C._nn, "silu"),
        (transformers.activations.SiLUActivation, "forward"),
        (transformers.PreTrainedModel, "get_input_embeddings"),
        (transformers.masking_utils, "causal_mask_function"),
        (transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS, "yarn"),
    ],
    ids=lambda target: f"{getattr(target[0], '__name__', 'dict')}.{target[1]}",
)
def test_patched_framework_is_part_of_it(llama, monkeypatch, target):
    """Of what a decoder of transformers reaches."""
    owner, name = target
    before = of(llama)
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, name, doubled)
    else:
        monkeypatch.setattr(owner, name, doubled, raising=False)
    assert of(llama) != before


def test_patches_that_framework_code_wraps_are_part_of_it(llama, monkeypatch):
    before = of(llama)
    monkeypatch.setattr(nn.Linear, "forward", torch.no_grad()(doubled))
    assert of(llama) != before


@pytest.fixture(scope="module")
def llama():
    return build_tiny_model("llama", num_hidden_layers=2)


def test_attributes_of_activation_classes_are_part_of_it(llama, monkeypatch):
    """``ACT2FN`` makes objects of them."""
    cls = type(llama.model.layers[0].mlp.act_fn)
    before = of(llama)
    monkeypatch.setattr(cls, "gain", 2.0, raising=False)
    assert of(llama) != before


def test_modes_are_part_of_it(llama):
    before = of(llama)
    with torch.autocast("cpu", torch.bfloat16):
        assert of(llama) != before

    class Mode(TorchDispatchMode):
        pass

    with Mode(), pytest.raises(CannotIdentify, match="mode Mode"):
        told(llama)


def test_kernels_registered_for_operators_of_torch_are_refused(llama, monkeypatch):
    monkeypatch.setattr(torch.library, "_impls", torch.library._impls | {"aten/silu/CPU"})
    with pytest.raises(CannotIdentify, match="aten/silu"):
        told(llama)


def test_the_classes_of_all_models_are_told_by_the_version(monkeypatch):
    """Models that contain others name transformers' auto classes, which import a module for every item that is read,
    some of which fail."""
    from transformers.models.auto.auto_factory import _LazyAutoMapping

    def fail(*args):
        raise ValueError("could not find a model")

    model = build_tiny_model("llama", num_hidden_layers=1)
    model.auto_class = transformers.AutoModel
    before = told(model)
    for name in ("items", "values", "__getitem__"):
        monkeypatch.setattr(_LazyAutoMapping, name, fail)
    assert before == told(model)


class Failing(dict):
    def items(self):
        raise ValueError("not now")


def test_what_fails_when_it_is_looked_at_is_not_identified():
    model = build_tiny_model("llama", num_hidden_layers=1)
    model.failing = Failing(a=1)
    with pytest.raises(CannotIdentify, match="looking at it fails: ValueError: not now"):
        told(model)
